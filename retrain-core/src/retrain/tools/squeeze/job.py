"""`[squeeze]` executed: the analysis, its records, and the compressed adapter if one is requested."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.records.files import write_json
from retrain.run.fault_guard import reason_of
from retrain.run.wandb_runs import open_run
from retrain.text.secrets import hide
from retrain.text.tables import table_lines
from retrain.text.terminal_text import printable
from retrain.tools.squeeze.adapter import unusable
from retrain.tools.squeeze.compress import CompressedAdapter, compress_adapter
from retrain.tools.squeeze.spectrum import SqueezeAnalysis, analyze_adapter
from retrain.tools.squeeze.spectrum_pages import DATA_FILE, FOLDER, write_plot
from retrain.tools.squeeze.table import SqueezeTable

LOG = logging.getLogger("retrain")
PLOT_FILE = "spectrum.html"
RUN_NAME = "squeeze-analysis"
VALUES = ("rank", "mean_variance", "min_variance", "max_variance")
FRAME = "=" * 60
COLUMNS = ("  Rank", "Mean Var%", "Min Var%", "Max Var%", "Energy Var%", "")
MARKER = "<--"
NO_PROMISE = "A spectrum does not measure quality: `retrain squeeze ... --eval` measures the smaller adapter."


@dataclass(frozen=True, slots=True, kw_only=True)
class SqueezeResult:
    analysis: SqueezeAnalysis
    compressed: CompressedAdapter | None
    report: Path

    def as_data(self) -> dict[str, Any]:
        data = self.analysis.as_data() | {"report": str(self.report)}
        if self.compressed is not None:
            data["compressed"] = {k: v for k, v in self.compressed.as_data().items() if k != "layers"}
        return data

    def lines(self, *, framed: bool = False) -> list[str]:
        lines = analysis_lines(self.analysis, framed=framed)
        if self.compressed is not None:
            rank, path = self.compressed.rank, printable(str(self.compressed.path))
            before, after = self.compressed.source_bytes / 2**20, self.compressed.num_bytes / 2**20
            what = f"alpha {self.compressed.alpha:g}, {before:.1f} -> {after:.1f} MiB"
            lines.append(f"Compressed to rank {rank} ({what}): {path}")
        return [*lines, f"Spectrum: {self.report / PLOT_FILE}"]


def run_job(
    adapter: Path | str, settings: SqueezeTable, report: Path, *, wandb: Mapping[str, Any] | None = None
) -> SqueezeResult:
    """Analyse, write the report, compress if `output_path` is set.

    `wandb` holds the keys of `[logging]`: with a `wandb_project` among them the analysis is recorded there.
    """
    analysis = analyze_adapter(
        adapter,
        target_ranks=settings.target_ranks,
        min_variance_retention=settings.min_variance_retention,
        source_rank=settings.source_rank,
        device=settings.device,
    )
    try:
        report.mkdir(parents=True, exist_ok=True)
        write_json(report / DATA_FILE, analysis.as_data(layers=True))
        write_plot(analysis, report / PLOT_FILE)
    except OSError as error:
        what, fix = f"cannot be written: {error.strerror or error}", "choose a writable folder with enough space"
        raise unusable(report, code="squeeze.unwritable", what=what, fix=fix) from error
    if wandb is not None:
        record_analysis(analysis, wandb, report)
    compressed = None
    if settings.output_path:
        compressed = compress_adapter(
            analysis.adapter, settings.output_path, rank_to_keep(analysis, settings), device=settings.device
        )
    return SqueezeResult(analysis=analysis, compressed=compressed, report=report)


def rank_to_keep(analysis: SqueezeAnalysis, settings: SqueezeTable) -> int:
    """Return `compress_to`, or the recommended rank; ConfigError when there is neither."""
    rank = settings.compress_to or analysis.recommended_rank
    if rank is None:
        reason = "the adapter learned no update" if analysis.learned_nothing else "no tested rank keeps enough variance"
        what, fix = f"no rank is recommended: {reason}", "set [squeeze] compress_to (--squeeze-compress-to)"
        raise unusable(analysis.adapter, code="squeeze.no-rank", what=what, fix=fix)
    return rank


def auto_squeeze(
    adapter: Path | str, settings: SqueezeTable, out_folder: Path | str, *, wandb: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Squeeze the adapter of a campaign's first run; return the entry for the manifest.

    The framed table goes to the log, the report to `out_folder`/squeeze. RetrainError if the adapter cannot be used.
    """
    result = run_job(adapter, settings, Path(out_folder) / FOLDER, wandb=wandb)
    for line in result.lines(framed=True):
        LOG.info("%s", line)
    return result.as_data()


def record_analysis(analysis: SqueezeAnalysis, table: Mapping[str, Any], folder: Path) -> str:
    """Send the analysis to the `wandb_project` of `[logging]`; return the run's id, or "" without a project.

    A fault of wandb is logged and ends nothing.
    """
    if not table.get("wandb_project"):
        return ""
    data, best = analysis.as_data(), analysis.recommended_rank
    tags = [tag.strip() for tag in table.get("wandb_tags", "").split(",") if tag.strip()]
    tags += ["squeeze", *([] if best is None else [f"rank-{best}"])]
    arguments = {
        "project": table["wandb_project"],
        "entity": table.get("wandb_entity") or None,
        "group": table.get("wandb_group") or None,
        "name": RUN_NAME,
        "job_type": "squeeze",
        "tags": list(dict.fromkeys(tags)),
        "dir": os.environ.get("WANDB_DIR") or str(folder),
        "config": hide({name: value for name, value in data.items() if name != "ranks"}),
    }
    try:
        import wandb

        run = open_run(arguments)
        rows = [[getattr(row, name) for name in VALUES] for row in analysis.rows]
        run.define_metric("squeeze/*", step_metric="squeeze/rank")
        for row in rows:
            run.log({f"squeeze/{name}": value for name, value in zip(VALUES, row, strict=True)})
        content = [[*row, row[0] == best] for row in rows]
        run.log({"squeeze/variance_table": wandb.Table(columns=[*VALUES, "recommended"], data=content)})
        names = ("recommended_rank", "source_rank", "min_variance_retention", "num_layers")
        run.summary.update({f"squeeze/{name}": data[name] for name in names})
        run.finish()
        return str(run.id)
    # No package, disk or server: the analysis itself is complete and must not be lost with it.
    except Exception as error:
        LOG.warning("The squeeze analysis is not in wandb: %s", reason_of(error))
        return ""


def analysis_lines(analysis: SqueezeAnalysis, *, framed: bool = False) -> list[str]:
    """Return header, table and recommendation; `framed` puts a line of `=` above and below, as campaigns do."""
    idle, share = analysis.num_without_update, f"{100 * analysis.min_variance_retention:.6g}%"
    lines = [
        f"LoRA-Squeeze: {printable(str(analysis.adapter))}",
        f"Threshold: {share} variance retained",
        f"Source rank: {analysis.source_rank}",
        f"Layers analyzed: {len(analysis.layers)}",
        *([f"Layers without an update, left out of every mean: {idle}"] if idle else []),
        "",
    ]
    if analysis.rows:
        best = analysis.recommended_rank
        rows = [(str(row.rank), *row.percents, MARKER if row.rank == best else "") for row in analysis.rows]
        head, *table = table_lines(COLUMNS, rows, num_names=0)
        lines += [head, "-" * len(head), *table, ""]
    lines += _recommendation(analysis, f">= {share} variance retained")
    return [FRAME, *lines, FRAME] if framed else lines


def _recommendation(analysis: SqueezeAnalysis, threshold: str) -> list[str]:
    if analysis.learned_nothing:
        return ["No update learned: B A is zero in every layer, so no rank can be recommended."]
    row = next((row for row in analysis.rows if row.rank == analysis.recommended_rank), None)
    if row is None:
        rest = f"source rank {analysis.source_rank} keeps all"
        return [f"Recommended rank: none of the tested ones ({threshold}); {rest}"]
    lines = [f"Recommended rank: {row.rank} ({threshold})"]
    if row.min_variance < analysis.min_variance_retention:
        lines.append(f"Least variance is kept in {printable(row.worst_module)}: {100 * row.min_variance:.2f}%")
    return [*lines, NO_PROMISE]
