"""Compares two runs: results, settings, and the first step at which they diverge."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.inspect.diff_data import DataDiff, Reader, compare_data
from retrain.inspect.diff_metrics import FINAL, HELD_OUT, MetricsDiff, compare_metrics
from retrain.inspect.diff_setup import SetupDiff, compare_setups, read_setup
from retrain.records.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class RunDiff:
    """Run A against run B; labels are the folders as given."""

    label_a: str
    label_b: str
    status_a: str
    status_b: str
    setup: SetupDiff
    data: DataDiff
    metrics: MetricsDiff

    @property
    def is_identical(self) -> bool:
        """The same steps with the same batches and results; settings and packages may differ."""
        return self.metrics.is_same and self.data.differing_step is None

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        a, b = self.metrics.curve_a, self.metrics.curve_b
        return {
            "label_a": self.label_a,
            "label_b": self.label_b,
            "status_a": self.status_a,
            "status_b": self.status_b,
            "identical": self.is_identical,
            "final_a": {name: a.final[name] for name in (*FINAL, *HELD_OUT)},
            "final_b": {name: b.final[name] for name in (*FINAL, *HELD_OUT)},
            "wall_time_a": a.wall_time_s,
            "wall_time_b": b.wall_time_s,
            "steps_a": a.steps,
            "steps_b": b.steps,
            "curve_a": a.rates,
            "curve_b": b.rates,
            **self.setup.as_data(),
            "data": self.data.as_data(),
            "metrics": self.metrics.as_data(),
        }


def compare_runs(a: Path, b: Path) -> RunDiff:
    """Read both folders, streaming the records; ConfigError names the first unreadable file and line."""
    setup_a, setup_b = read_setup(a), read_setup(b)
    metrics = compare_metrics(Run(a), Run(b))
    return RunDiff(
        label_a=str(a),
        label_b=str(b),
        status_a=str(setup_a.manifest.get("status", "unknown")),
        status_b=str(setup_b.manifest.get("status", "unknown")),
        setup=compare_setups(setup_a, setup_b),
        data=compare_data(Reader(Run(a), metrics.curve_a.last_step), Reader(Run(b), metrics.curve_b.last_step)),
        metrics=metrics,
    )
