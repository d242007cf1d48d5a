"""The spectrum as a page: one self-contained HTML file that needs no network."""

from __future__ import annotations

import html
from pathlib import Path
from typing import Any

from retrain.records.files import write_text
from retrain.text.terminal_text import printable
from retrain.tools.squeeze.analysis import LayerSpectrum, SqueezeAnalysis

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6D31")  # Okabe-Ito without yellow
GREY = "#888888"
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem }}
table {{ border-collapse: collapse }}
th, td {{ padding: 0.2rem 0.8rem; text-align: right }}
tr.recommended {{ font-weight: bold }}
</style>
</head>
<body>
<h1>{title}</h1>
<p>{summary}</p>
{table}
{figure}
<script>
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const paint = () => document.querySelectorAll(".plotly-graph-div").forEach(
  (plot) => Plotly.relayout(plot, {{"font.color": dark.matches ? "#dddddd" : "#222222"}}));
dark.addEventListener("change", paint);
paint();
</script>
</body>
</html>
"""


def write_plot(analysis: SqueezeAnalysis, path: Path) -> None:
    """Write the page: V over the rank for every module and on average, and the rank that each module needs."""
    figure = spectrum_figure(analysis).to_html(
        full_html=False, include_plotlyjs=True, config={"displaylogo": False, "responsive": True}
    )
    title = f"Spectrum of {_text(analysis.adapter.name)}"
    share = f"{100 * analysis.min_variance_retention:.6g} %"
    result = f"Recommended rank: {analysis.recommended_rank} of {analysis.source_rank} ({share} of the variance)."
    if analysis.learned_nothing:
        result = "No update learned."
    elif analysis.recommended_rank is None:
        result = f"No tested rank keeps {share} of the variance; the source rank is {analysis.source_rank}."
    summary = f"{_text(str(analysis.adapter))}: {len(analysis.layers)} layers. {result}"
    write_text(path, PAGE.format(title=title, summary=summary, table=_table(analysis), figure=figure))


def spectrum_figure(analysis: SqueezeAnalysis) -> Any:
    """The plotly figure; names of modules are untrusted and escaped."""
    from plotly.subplots import make_subplots

    heads = ("Variance kept at each rank", "Rank that each layer needs")
    figure = make_subplots(rows=2, cols=1, subplot_titles=heads, vertical_spacing=0.12)
    _add_layers(figure, analysis)
    _add_means(figure, analysis)
    _add_needs(figure, analysis)
    figure.update_xaxes(title_text="rank", type="log", tickvals=[row.rank for row in analysis.rows], row=1, col=1)
    figure.update_yaxes(title_text="variance kept", tickformat=".0%", row=1, col=1)
    figure.update_xaxes(title_text="layer, from the first to the last", row=2, col=1)
    figure.update_yaxes(title_text="rank", rangemode="tozero", row=2, col=1)
    figure.update_layout(
        height=900,
        template="none",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(128,128,128,0.08)",
        margin={"l": 70, "r": 20, "t": 50, "b": 60},
    )
    return figure


def _add_layers(figure: Any, analysis: SqueezeAnalysis) -> None:
    """All modules as one trace with gaps, since hundreds of traces would make the page slow."""
    x: list[int | None] = []
    y: list[float | None] = []
    names: list[str] = []
    for layer in analysis.layers:
        if layer.variance_R is None:
            continue
        name = _text(layer.module)
        for rank in _shown_ranks(layer.rank, analysis):
            x.append(rank)
            y.append(float(layer.variance_R[rank - 1]))
            names.append(name)
        x.append(None)
        y.append(None)
        names.append("")
    line = {"color": GREY, "width": 1}
    hover = "%{text}<br>rank %{x}: %{y:.2%}<extra></extra>"
    style = {"mode": "lines", "opacity": 0.35, "line": line, "name": "each layer"}
    figure.add_scatter(x=x, y=y, text=names, hovertemplate=hover, row=1, col=1, **style)


def _shown_ranks(rank: int, analysis: SqueezeAnalysis) -> list[int]:
    """All ranks up to 16, then in steps of an eighth, and the tested ones."""
    shown, k = {row.rank for row in analysis.rows if row.rank <= rank} | {rank}, 1
    while k <= rank:
        shown.add(k)
        k += max(1, k // 8)
    return sorted(shown)


def _add_means(figure: Any, analysis: SqueezeAnalysis) -> None:
    ranks = [row.rank for row in analysis.rows]
    curves = (
        ("mean of layers", [row.mean_variance for row in analysis.rows], PALETTE[0], "solid"),
        ("weighted by energy", [row.energy_variance for row in analysis.rows], PALETTE[2], "dash"),
        ("least", [row.min_variance for row in analysis.rows], PALETTE[1], "dot"),
    )
    for name, values, color, dash in curves:
        hover = f"{name}<br>rank %{{x}}: %{{y:.2%}}<extra></extra>"
        line = {"color": color, "width": 3, "dash": dash}
        figure.add_scatter(x=ranks, y=values, name=name, mode="lines+markers", line=line, hovertemplate=hover)
    figure.add_hline(y=analysis.min_variance_retention, line={"color": GREY, "dash": "dash"}, row=1, col=1)
    if analysis.recommended_rank is not None:
        figure.add_vline(x=analysis.recommended_rank, line={"color": PALETTE[0], "dash": "dash"}, row=1, col=1)


def _add_needs(figure: Any, analysis: SqueezeAnalysis) -> None:
    """Points by kind of module (`q_proj`), so that a kind that needs a higher rank stands out."""
    kinds: dict[str, list[tuple[int, LayerSpectrum]]] = {}
    for number, layer in enumerate(analysis.layers):
        if layer.rank_needed is not None:
            kinds.setdefault(layer.module.rpartition(".")[2], []).append((number, layer))
    for index, (kind, members) in enumerate(sorted(kinds.items())):
        figure.add_scatter(
            x=[number for number, _ in members],
            y=[layer.rank_needed for _, layer in members],
            text=[_text(layer.module) for _, layer in members],
            name=_text(kind),
            mode="markers",
            marker={"color": PALETTE[index % len(PALETTE)], "symbol": index % 8, "size": 7},
            hovertemplate="%{text}<br>needs rank %{y}<extra></extra>",
            row=2,
            col=1,
        )


def _table(analysis: SqueezeAnalysis) -> str:
    if not analysis.rows:
        return ""
    names = ("Rank", "Mean Var%", "Min Var%", "Max Var%", "Energy Var%")
    lines = ["<table>", "<tr>" + "".join(f"<th>{name}</th>" for name in names) + "</tr>"]
    for row in analysis.rows:
        mark = ' class="recommended"' if row.rank == analysis.recommended_rank else ""
        values = (row.mean_variance, row.min_variance, row.max_variance, row.energy_variance)
        cells = "".join(f"<td>{100 * value:.2f}</td>" for value in values)
        lines.append(f"<tr{mark}><td>{row.rank}</td>{cells}</tr>")
    return "\n".join([*lines, "</table>"])


def _text(name: str) -> str:
    return html.escape(printable(name))
