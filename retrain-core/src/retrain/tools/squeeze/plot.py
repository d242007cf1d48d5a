"""The spectrum as a page: one self-contained HTML file that needs no network."""

from __future__ import annotations

from pathlib import Path

from retrain.records.files import write_text
from retrain.report.parts import Plot, Section, Table, Tiles, drawn, lede
from retrain.report.shell import sections_page
from retrain.tools.squeeze.analysis import SqueezeAnalysis
from retrain.tools.squeeze.report_section import kept, needed


def write_plot(analysis: SqueezeAnalysis, path: Path) -> None:
    """Write the page: variance kept at each rank, and the rank that each module needs. Their names are untrusted."""
    share = f"{100 * analysis.min_variance_retention:.6g} %"
    result = f"Recommended rank: {analysis.recommended_rank} of {analysis.source_rank} ({share} of the variance)."
    if analysis.learned_nothing:
        result = "No update learned."
    elif analysis.recommended_rank is None:
        result = f"No tested rank keeps {share} of the variance; the source rank is {analysis.source_rank}."
    summary = lede(f"{analysis.adapter}: {len(analysis.layers)} layers. {result}")
    parts = (summary, _table(analysis), Tiles("plots", spectrum_plots(analysis)))
    page = sections_page("retrain squeeze", f"Spectrum of {analysis.adapter.name}", [Section("ranks", "Ranks", parts)])
    write_text(path, page)


def spectrum_plots(analysis: SqueezeAnalysis) -> list[Plot]:
    """The plots; kinds of modules (`q_proj`) differ in colour, so that one that needs a higher rank stands out."""
    content = analysis.as_data(layers=True)
    if not content["ranks"]:
        return []
    plots = [drawn(kept(content["ranks"], content["layers"], content))]
    for plot in needed(content["layers"]):
        plots.append(drawn(plot, kinds=[label.rpartition(".")[2] for label in plot.labels]))
    return plots


def _table(analysis: SqueezeAnalysis) -> Table | None:
    if not analysis.rows:
        return None
    rows = [
        (
            str(row.rank),
            *(
                f"{100 * value:.2f}"
                for value in (row.mean_variance, row.min_variance, row.max_variance, row.energy_variance)
            ),
        )
        for row in analysis.rows
    ]
    strong = next((number for number, row in enumerate(analysis.rows) if row.rank == analysis.recommended_rank), None)
    heads = ("Rank", "Mean Var%", "Min Var%", "Max Var%", "Energy Var%")
    return Table("Variance kept", heads, rows, is_caption_shown=False, strong=strong)
