"""A decomposition of variance in words and as the documented JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from retrain.records.runs.metric import shown_difference
from retrain.verdicts.stats.variance import REST, Components
from retrain.verdicts.study.variance import Decomposition


def variance_sentences(found: Decomposition) -> Iterator[str]:
    """What was estimated and what could not be, in plain English."""
    parts = found.components
    spread = shown_difference(parts.total**0.5, found.metric, signed=False)
    conditions = f" of {found.conditions} conditions" if found.conditions > 1 else ""
    yield (
        f"{parts.runs} runs{conditions}: {found.metric} has a standard deviation of {spread} within a condition "
        f"after {found.budget:,.0f} steps. Shares of that variance, with {100 * parts.level:.0f} % intervals:"
    )
    for part in parts.parts:
        low, high = part.interval
        name = rest_name(parts) if part.name == REST else part.name
        yield f"{name}: {100 * part.share:.0f} % ({100 * low:.0f} to {100 * high:.0f} %)"
    for names in parts.together:
        yield f"{_joined(names)} always moved together: their shares cannot be told apart."
    if parts.constant:
        yield f"never moved: {_joined(parts.constant)}. What it would add is not in these figures."
    if parts.tangled:
        yield f"{_joined(parts.tangled)} never moved alone: no share can be given."
    if found.left_out:
        reasons = Counter(reason for _, reason in found.left_out)
        yield f"left out: {', '.join(f'{count} runs ({reason})' for reason, count in reasons.most_common())}"
    if noise := found.noise:
        sd = shown_difference(noise.variance**0.5, found.metric, signed=False)
        where = "evaluation" if any("evaluation" in part.name for part in parts.parts) else "the rest"
        yield (
            f"Of a single run, the finite number of held-out completions makes up a standard deviation of {sd}, "
            f"{100 * noise.share:.0f} % of the variance; it is a part of {where}."
        )


def rest_name(parts: Components) -> str:
    """The rest, with the sources that had another seed in every run."""
    return f"rest (with {_joined(parts.in_rest)})" if parts.in_rest else "rest (interactions, and what no seed decides)"


def variance_data(found: Decomposition) -> dict[str, Any]:
    """Plain data; `noise` is null where the runs recorded no single completions of held-out examples."""
    parts = asdict(found.components)
    return {
        "metric": str(found.metric),
        "budget": found.budget,
        "conditions": found.conditions,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in parts.items()},
        "noise": asdict(found.noise) if found.noise else None,
        "left_out": [{"name": name, "reason": reason} for name, reason in found.left_out],
    }


def _joined(names: Sequence[str]) -> str:
    *first, last = names
    return f"{', '.join(first)} and {last}" if first else last
