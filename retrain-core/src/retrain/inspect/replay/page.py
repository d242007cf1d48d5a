"""A replay as a page: one self-contained HTML file that needs no network."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.inspect.replay.show import SEVERAL, lines
from retrain.text.terminal_text import printable

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#8C6D31")  # Okabe-Ito without yellow
ROW, LONGEST = 46, 60  # pixels for a condition; letters of a name
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<style>
body {{ font-family: system-ui, sans-serif; margin: 1.5rem auto; max-width: 75rem; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: .5rem 0 }}
th, td {{ padding: .2rem .8rem; text-align: right; vertical-align: top }}
th:first-child, td:first-child, .text {{ text-align: left; overflow-wrap: anywhere }}
.mono {{ font-family: ui-monospace, monospace; white-space: pre-wrap }}
</style>
</head>
<body>
<h1>{title}</h1>
<p class="mono">{as_it_was}</p>
<p><strong>{note}</strong></p>
{several}{figure}
{tables}
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
Data = Mapping[str, Any]


def render(data: Data) -> str:
    """The page; names, prompts and tokens are untrusted and escaped."""
    others = data["conditions"][1:]
    figure = ""
    if others:
        config = {"displaylogo": False, "responsive": True}
        figure = _figure(data).to_html(full_html=False, include_plotlyjs=True, config=config)
    head = lines({**data, "conditions": [], "updates": 1})
    several = f"<p>{SEVERAL.format(data['updates'])}</p>\n" if data["updates"] > 1 else ""
    return PAGE.format(
        title=_text(head[0]),
        as_it_was="\n".join(_text(line.strip()) for line in head[1:]),
        note=_text(data["note"]),
        several=several,
        figure=figure,
        tables="\n".join(_tables(each) for each in others),
    )


def _figure(data: Data) -> Any:
    """Cosine with its interval, norm and clipped share of each condition, and each group's part of the turn."""
    from plotly.subplots import make_subplots

    others = data["conditions"][1:]
    heads = ("cosine to the gradient taken", "norm / taken", "clipped tokens", "part of 1 - cosine, by prompt")
    height = 90 + ROW * len(others)
    lower = max(220, 60 + 24 * len(others))
    figure = make_subplots(
        rows=2,
        cols=3,
        specs=[[{}, {}, {}], [{"colspan": 3}, None, None]],
        subplot_titles=heads,
        column_widths=[0.5, 0.25, 0.25],
        row_heights=[height, lower],
        vertical_spacing=0.16,
        shared_yaxes=False,
    )
    names = [_short(each["name"], number) for number, each in enumerate(others, start=1)]
    colors = [PALETTE[number % len(PALETTE)] for number in range(len(others))]
    _add_cosines(figure, others, names, colors)
    for column, key in ((2, "norm_ratio"), (3, "clip_fraction")):
        values = [each[key] for each in others]
        bars = {"orientation": "h", "marker": {"color": colors}, "showlegend": False, "cliponaxis": False}
        form = ".2f" if key == "norm_ratio" else ".1%"
        labels = ["-" if value is None else format(value, form) for value in values]
        figure.add_bar(x=values, y=names, text=labels, textposition="outside", **bars, row=1, col=column)
        figure.update_yaxes(showticklabels=False, autorange="reversed", row=1, col=column)
        most = max([0.01, *(value for value in values if value is not None)])
        figure.update_xaxes(range=[0.0, 1.25 * most], nticks=4, row=1, col=column)
    figure.update_xaxes(tickformat=".1%", row=1, col=3)
    for name, color, each in zip(names, colors, others, strict=True):
        style = {"name": name, "marker": {"color": color}, "hovertemplate": "prompt of group %{x}: %{y:.3g}"}
        figure.add_bar(x=list(range(len(each["parts"]))), y=each["parts"], **style, row=2, col=1)
    figure.update_xaxes(title_text="group of the step", dtick=1, row=2, col=1)
    figure.update_layout(
        height=height + lower + 120,
        template="none",
        barmode="group",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(128,128,128,0.08)",
        margin={"l": 20, "r": 20, "t": 50, "b": 60},
        legend={"orientation": "h", "y": -0.12},
    )
    figure.update_yaxes(automargin=True)
    return figure


def _add_cosines(figure: Any, others: Sequence[Data], names: Sequence[str], colors: Sequence[str]) -> None:
    cosines = [each["cosine"] for each in others]
    above = [(each["high"] or each["cosine"] or 0.0) - (each["cosine"] or 0.0) for each in others]
    below = [(each["cosine"] or 0.0) - (each["low"] or each["cosine"] or 0.0) for each in others]
    bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 2}
    figure.add_scatter(
        x=cosines,
        y=names,
        mode="markers",
        marker={"color": colors, "size": 10},
        error_x=bars,
        showlegend=False,
        hovertemplate="%{y}: %{x:.4f}<extra></extra>",
        row=1,
        col=1,
    )
    figure.update_yaxes(autorange="reversed", row=1, col=1)
    figure.add_vline(x=1.0, line={"color": "#888888", "dash": "dash"}, row=1, col=1)


def _tables(condition: Data) -> str:
    """What turns a condition most."""
    cosine = condition["cosine"]
    told = "no direction" if cosine is None else f"cosine {cosine:.4f}"
    trained = f"{condition['trained_tokens']} tokens of {condition['trained_groups']} groups trained"
    found = [f"<h2>{_text(condition['name'])}</h2>", f"<p>{told}, {trained}, loss {condition['loss']:.6g}</p>"]
    if condition["prompts"]:
        rows = [
            (each["prompt"], each["example_id"], each["group"], f"{each['part'] / (1.0 - cosine):.1%}")
            for each in condition["prompts"]
        ]
        found.append(_table(("prompt", "example", "group", "of the turn"), rows))
    if condition["tokens"]:
        changes = [
            (
                repr(each["token"]),
                f"group {each['group']}, completion {each['index']}, token {each['position']}",
                "-" if each["reward"] is None else f"{each['reward']:g}",
                f"{each['before']:+.3g}",
                f"{each['after']:+.3g}",
            )
            for each in condition["tokens"]
        ]
        found.append(_table(("token", "where", "reward", "weight taken", "weight here"), changes))
    return "\n".join(found)


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    top = "".join(f"<th>{head}</th>" for head in heads)
    body = ["<tr>" + "".join(f"<td>{_text(str(cell))}</td>" for cell in row) + "</tr>" for row in rows]
    return "\n".join(["<table>", f"<tr>{top}</tr>", *body, "</table>"])


def _short(name: str, number: int) -> str:
    """A name for the axes, unique by its number."""
    cut = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
    return f"{number}. {_text(cut)}"


def _text(text: str) -> str:
    return html.escape(printable(text))
