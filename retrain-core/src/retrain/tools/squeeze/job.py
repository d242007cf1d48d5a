"""Executes `[squeeze]`: the analysis, its records, and the compressed adapter if one is requested."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.records.files import write_json
from retrain.tools.squeeze.analysis import SqueezeAnalysis, analyze_adapter
from retrain.tools.squeeze.compress import CompressedAdapter, compress_adapter
from retrain.tools.squeeze.show import analysis_lines, compressed_lines
from retrain.tools.squeeze.spectrum_pages import write_plot
from retrain.tools.squeeze.table import SqueezeTable
from retrain.tools.squeeze.tensor_file import unusable
from retrain.tools.squeeze.wandb_records import record_analysis

LOG = logging.getLogger("retrain")
DATA_FILE, PLOT_FILE = "spectrum.json", "spectrum.html"


@dataclass(frozen=True, slots=True, kw_only=True)
class SqueezeResult:
    """The result of a job; `report` is the folder of `spectrum.json` and `spectrum.html`."""

    analysis: SqueezeAnalysis
    compressed: CompressedAdapter | None
    report: Path

    def as_data(self) -> dict[str, Any]:
        """Plain data for a manifest: without the spectra, which are in the report."""
        data = self.analysis.as_data() | {"report": str(self.report)}
        if self.compressed is not None:
            data["compressed"] = {k: v for k, v in self.compressed.as_data().items() if k != "layers"}
        return data

    def lines(self, *, framed: bool = False) -> list[str]:
        """The result as text."""
        lines = analysis_lines(self.analysis, framed=framed)
        if self.compressed is not None:
            lines += compressed_lines(self.compressed)
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
        raise unusable(report, f"cannot be written: {error.strerror or error}", fix="choose another folder") from error
    if wandb is not None:
        record_analysis(analysis, wandb, report)
    compressed = None
    if settings.output_path:
        compressed = compress_adapter(
            analysis.adapter, settings.output_path, rank_to_keep(analysis, settings), device=settings.device
        )
    return SqueezeResult(analysis=analysis, compressed=compressed, report=report)


def rank_to_keep(analysis: SqueezeAnalysis, settings: SqueezeTable) -> int:
    """`compress_to`, or the recommended rank; ConfigError when there is neither."""
    rank = settings.compress_to or analysis.recommended_rank
    if rank is None:
        reason = "the adapter learned no update" if analysis.learned_nothing else "no tested rank keeps enough variance"
        what = f"no rank is recommended: {reason}"
        raise unusable(analysis.adapter, what, fix="set [squeeze] compress_to (--squeeze-compress-to)")
    return rank


def auto_squeeze(
    adapter: Path | str, settings: SqueezeTable, out_folder: Path | str, *, wandb: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Squeeze the adapter of a campaign's first run: framed table on the console, report in `out_folder`/squeeze.

    Returns the entry for the manifest (`recommended_rank` is None if there is none). RetrainError if the adapter cannot
    be used; a campaign logs it and continues.
    """
    result = run_job(adapter, settings, Path(out_folder) / "squeeze", wandb=wandb)
    for line in result.lines(framed=True):
        LOG.info("%s", line)
    return result.as_data()
