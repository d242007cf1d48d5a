"""Fields of a step's line in `metrics.jsonl`: those of the optimizer step, and how to add others."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from retrain.kernel.errors import PluginError, Problem
from retrain.kernel.types import TrainReport

Fields = dict[str, Any]


def merge_fields(metrics: Fields, fields: Mapping[str, Any], *, source: str) -> Fields:
    """`metrics` with `fields` added; PluginError when one exists already, or is not text, a boolean or finite."""
    added = {}
    for name, value in fields.items():
        plain = value.item() if isinstance(value, np.generic) else value
        if name in metrics:
            raise PluginError(Problem(what=f"metric {name!r} of {source} exists already", fix="give it another name"))
        if not isinstance(plain, bool | int | float | str):
            what = f"metric {name!r} of {source} is {type(plain).__name__}, not text or a number"
            raise PluginError(Problem(what=what, fix="return plain values"))
        if isinstance(plain, float) and not math.isfinite(plain):
            raise PluginError(Problem(what=f"metric {name!r} of {source} is {plain}", fix="leave it out instead"))
        added[name] = plain
    return metrics | added


def train_fields(report: TrainReport | None) -> Fields:
    """What the optimizer step reported; a null loss and no ratios when there was nothing to train."""
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
