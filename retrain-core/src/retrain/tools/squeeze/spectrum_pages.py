"""The spectrum as a page that needs no network, and as a section of a report about its run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from retrain.kernel.contracts.report import ReportPlot, ReportSection
from retrain.kernel.errors import ConfigError
from retrain.records.files import write_text
from retrain.records.reading import Record, number, read_object, tables_in
from retrain.records.record_names import CAMPAIGN_FILE
from retrain.report.parts import Plot, Section, Tiles, drawn, lede
from retrain.report.shell import sections_page
from retrain.text.amounts import percent
from retrain.tools.squeeze.spectrum import SqueezeAnalysis

FOLDER, DATA_FILE = "squeeze", "spectrum.json"
CURVES = (("mean of layers", "mean_variance"), ("weighted by energy", "energy_variance"), ("least", "min_variance"))
COLUMNS = (*CURVES, ("largest", "max_variance"))
MAX_BYTES = 256 << 20
MAX_LAYERS = 2000
NO_UPDATE = "The adapter learned no update."


def write_plot(analysis: SqueezeAnalysis, path: Path) -> None:
    """Write the page: variance kept at each rank, and the rank that each module needs. Their names are untrusted."""
    result = NO_UPDATE if analysis.learned_nothing else _recommendation(analysis.as_data())
    summary = lede(f"{analysis.adapter}: {len(analysis.layers)} layers. {result}")
    parts = (summary, Tiles("plots", spectrum_plots(analysis)))
    page = sections_page("retrain squeeze", f"Spectrum of {analysis.adapter.name}", [Section("ranks", "Ranks", parts)])
    write_text(path, page)


def spectrum_plots(analysis: SqueezeAnalysis) -> list[Plot]:
    """Return the plots; kinds of modules (`q_proj`) differ in colour, so that one with a higher rank is seen."""
    content = analysis.as_data(layers=True)
    if not content["ranks"]:
        return []
    plots = [drawn(_kept(content["ranks"], content["layers"], content))]
    for plot in _needed(content["layers"]):
        plots.append(drawn(plot, kinds=[label.rpartition(".")[2] for label in plot.labels]))
    return plots


def report_section(run: Path, campaign: Path | None) -> ReportSection | None:
    content, file = _of_campaign(campaign) if campaign else _of_run(run)
    if content is None:
        return None
    files = (file,) if file else ()
    rows = [row for row in tables_in(content.get("ranks")) if number(row.get("rank")) is not None]
    if not rows:
        return ReportSection(name="squeeze", text=NO_UPDATE, files=files)
    layers = list(tables_in(content.get("layers")))[:MAX_LAYERS]
    plots = [_kept(rows, layers, content), *_needed(layers)]
    return ReportSection(name="squeeze", text=_recommendation(content), plots=plots, files=files)


def _of_campaign(campaign: Path) -> tuple[Record | None, Path | None]:
    try:
        manifest = read_object(campaign / CAMPAIGN_FILE).get("squeeze")
    except ConfigError:
        manifest = None
    files = [campaign / FOLDER / DATA_FILE]
    if isinstance(manifest, dict) and isinstance(manifest.get("report"), str):
        files.append(Path(manifest["report"]) / DATA_FILE)
    for file in files:
        if (content := _read(file)) is not None:
            return content, file
    return (manifest if isinstance(manifest, dict) and "ranks" in manifest else None), None


def _of_run(run: Path) -> tuple[Record | None, Path | None]:
    """Return the spectrum file next to a run, unless it is about another run's adapter."""
    for file in (run / FOLDER / DATA_FILE, run.parent / FOLDER / DATA_FILE):
        adapter = (content := _read(file) or {}).get("adapter")
        if isinstance(adapter, str) and Path(adapter).resolve().is_relative_to(run.resolve()):
            return content, file
    return None, None


def _read(file: Path) -> Record | None:
    try:
        return read_object(file) if file.is_file() and file.stat().st_size <= MAX_BYTES else None
    except (ConfigError, OSError):
        return None


def _recommendation(content: Record) -> str:
    rank, source = number(content.get("recommended_rank")), number(content.get("source_rank"))
    kept = number(content.get("min_variance_retention"))
    share = f"{100 * kept:g} % of the variance" if kept is not None else "enough variance"
    if rank is None:
        return f"No tested rank below {source:g} keeps {share}." if source else f"No tested rank keeps {share}."
    of = f" of {source:g}" if source else ""
    return f"Rank {rank:g}{of} keeps {share}, averaged over layers. A spectrum does not measure quality: evaluate."


def _kept(rows: Sequence[Record], layers: Sequence[Record], content: Record) -> ReportPlot:
    ranks = [int(number(row.get("rank")) or 0) for row in rows]
    lines = {name: [number(row.get(field)) for row in rows] for name, field in CURVES}
    thin = [[_variance_at(each.get("variance"), rank) for rank in ranks] for each in layers]
    return ReportPlot(
        title="Variance kept at each rank",
        note="thin lines: single layers",
        x=ranks,
        lines={name: values for name, values in lines.items() if any(value is not None for value in values)},
        thin_lines=[values for values in thin if any(value is not None for value in values)],
        x_title="rank",
        x_mark=number(content.get("recommended_rank")),
        y_mark=number(content.get("min_variance_retention")),
        is_log_x=True,
        is_share=True,
        heads=("rank", *(name for name, _ in COLUMNS)),
        rows=[
            (
                f"{number(row.get('rank')):g}{' (recommended)' if row.get('recommended') is True else ''}",
                *(percent(number(row.get(field)), 2) for _, field in COLUMNS),
            )
            for row in rows
        ],
    )


def _needed(layers: Sequence[Record]) -> list[ReportPlot]:
    needed = [(str(each.get("module", "")), number(each.get("rank_needed"))) for each in layers]
    known = [(module, rank) for module, rank in needed if rank is not None]
    if not known:
        return []
    return [
        ReportPlot(
            title="Rank that each layer needs",
            note="from the first to the last",
            x=range(1, len(known) + 1),
            points=[rank for _, rank in known],
            labels=[module for module, _ in known],
            x_title="layer",
            y_title="rank",
        )
    ]


def _variance_at(variance: object, rank: int) -> float | None:
    if not isinstance(variance, list) or not variance:
        return None
    value = number(variance[min(rank, len(variance)) - 1])
    return None if value is None else round(value, 4)
