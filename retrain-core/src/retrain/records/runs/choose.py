"""Chooses the metrics of a comparison: the one that decides, and those shown for every condition."""

from __future__ import annotations

from collections.abc import Sequence
from difflib import get_close_matches

import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.runs.curves import Curves
from retrain.records.runs.metric import CORRECT, HELD_OUT, HELD_OUT_REWARD, PASS_PREFIX, Metric, Summary


def chosen_metric(requested: Metric | None, curves: Sequence[Curves], *, where: str) -> Metric:
    """The requested metric (ConfigError if no run has it), else held-out if every run has it, else `correct_rate`.

    Held-out examples are the same for all runs and steps, unlike training batches, and are therefore preferred.
    """
    if requested is None:
        return HELD_OUT if all(_is_evaluated(each) for each in curves) else CORRECT
    if not any(each.has(requested.field) for each in curves):
        known = sorted({name for each in curves for name in each.values})
        near = get_close_matches(requested.field, known, n=1)
        fix = (
            f"did you mean {near[0]!r}?"
            if near
            else f"a field with numbers in metrics.jsonl, such as {', '.join(known)}"
        )
        raise ConfigError(Problem(where=where, what=f"no run has {requested.field!r}", fix=fix))
    return requested


def condition_metrics(metric: Metric, curves: Sequence[Curves]) -> tuple[Metric, ...]:
    """Metrics of each condition: final, best and area of `correct_rate` and the held-out rate, pass@k at the end.

    The held-out mean reward at the end is among them unless it equals the held-out rate everywhere, as with scores of 0
    and 1 alone. pass@1 always equals that rate and is left out. The deciding metric is always included.
    """
    fields = [CORRECT.field, *([HELD_OUT.field] if any(_is_evaluated(each) for each in curves) else [])]
    shown = [Metric(field, summary) for field in fields for summary in Summary]
    shown += [HELD_OUT_REWARD] if any(_is_graded(each) for each in curves) else []
    names = {name for each in curves for name in each.values if name.startswith(PASS_PREFIX)}
    sizes = sorted(int(size) for name in names if (size := name.removeprefix(PASS_PREFIX)).isdigit())
    shown += [Metric(f"{PASS_PREFIX}{size}") for size in sizes if size > 1]
    return tuple(dict.fromkeys((*shown, metric)))


def _is_graded(curves: Curves) -> bool:
    rewards_R, rates_R = curves.column(HELD_OUT_REWARD.field), curves.column(HELD_OUT.field)
    return bool((np.abs(rewards_R - rates_R) > 1e-9).any())


def _is_evaluated(curves: Curves) -> bool:
    return bool(np.isfinite(curves.column(HELD_OUT.field)[curves.steps_R >= 0]).any())
