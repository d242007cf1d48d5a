"""The counters that a run carries from step to step, the clock of a step, and the fields of its metrics line."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from retrain.kernel.errors import PluginError, Problem
from retrain.kernel.types import Group, TrainReport, num_correct


@dataclass(slots=True)
class Progress:
    """Counters of a run, all saved in every checkpoint.

    `step` is the next step. `unfinished` holds the fields of a step whose optimizer step is done but whose line in
    `metrics.jsonl` still awaits its evaluation. `has_first_eval`: the evaluation before training has its line.
    `versions`: policies before the current one that the coming steps are sampled with, the oldest first.
    """

    step: int = 0
    example_idx: int = 0
    total_correct: int = 0
    total_completions: int = 0
    bad_steps_in_a_row: int = 0
    unfinished: dict[str, Any] | None = None
    has_first_eval: bool = False
    versions: list[int] = field(default_factory=list)

    def count(self, groups: Sequence[Group]) -> None:
        self.total_correct += sum(num_correct(group) for group in groups)
        self.total_completions += sum(len(group.completions) for group in groups)

    def rate_fields(self) -> dict[str, float]:
        """Share of correct completions so far; empty where nothing is judged."""
        return {"running_correct_rate": self.total_correct / self.total_completions} if self.total_completions else {}


class Clock:
    """Seconds spent in a step and in each of its phases."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.phase_s = dict.fromkeys(("sample", "score", "train"), 0.0)
        self.spans: list[tuple[str, float, float]] = []  # phase, begin, end

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            ended = time.perf_counter()
            self.phase_s[phase] += ended - started
            self.spans.append((phase, started, ended))

    def fields(self) -> dict[str, float]:
        phases = {f"{phase}_time_s": seconds for phase, seconds in self.phase_s.items()}
        return {"step_time_s": time.perf_counter() - self.started, **phases}


Fields = dict[str, Any]


def merge_fields(metrics: Fields, fields: Mapping[str, Any], *, source: str) -> Fields:
    """Return `metrics` with `fields` added; PluginError if one exists already, or is not text, a boolean or finite."""
    added = {}
    for name, value in fields.items():
        # A NumPy scalar is a number to the plugin that made it, and an unknown type to `json`.
        plain = value.item() if isinstance(value, np.generic) else value
        if name in metrics:
            what = f"metric {name!r} of {source} exists already"
            raise PluginError(Problem(code="plugin.metric-twice", what=what, fix="give it another name"))
        if not isinstance(plain, bool | int | float | str):
            what = f"metric {name!r} of {source} is {type(plain).__name__}, not text or a number"
            raise PluginError(Problem(code="plugin.metric-type", what=what, fix="return plain values"))
        if isinstance(plain, float) and not math.isfinite(plain):
            what = f"metric {name!r} of {source} is {plain}"
            raise PluginError(Problem(code="plugin.metric-not-finite", what=what, fix="leave it out instead"))
        added[name] = plain
    return metrics | added


def train_fields(report: TrainReport | None) -> Fields:
    """Fields of the optimizer step; a null loss and no ratios when nothing was trained."""
    if report is None:
        return {"loss": None, "reported_loss": None, "loss_is_placeholder": False, "trained_tokens": 0, "updates": 0}
    measured = {
        "grad_norm": report.grad_norm,
        "ratio_mean": report.ratio_mean,
        "ratio_max": report.ratio_max,
        "logprob_gap_mean": report.gap_mean,
        "logprob_gap_p99": report.gap_p99,
        "logprob_gap_max": report.gap_max,
        "k3": report.k3,
        "ess_frac": report.ess_frac,
        "clip_fraction": report.clip_fraction,
        "clip_fraction_updates": list(report.clip_fractions) or None,
        "lr": report.lr,
        "rejected": report.rejected or None,
    }
    return {
        "loss": report.loss,
        "reported_loss": report.loss,
        "loss_is_placeholder": report.loss_is_placeholder,
        "trained_tokens": report.num_tokens,
        "updates": report.updates,
        **{name: value for name, value in measured.items() if value is not None},
    }
