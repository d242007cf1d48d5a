"""Metrics and rewards of weight 0 of v1 tasks: one that fails is left out instead of failing the episode."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

from verifiers.v1 import Task


def record_only_metrics_that_work() -> None:
    """From now on, what only measures costs its own value when it raises or is not finite, and not the score."""
    if not hasattr(Task, "_retrain_watched"):
        Task._retrain_watched = True
        Task.hooks, Task.plugged_judges = _hooks(Task.hooks), _judges(Task.plugged_judges)


def _hooks(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def hooks(self: Any, attr: str) -> list[Callable[..., Any]]:
        def measures(fn: Any) -> bool:
            return attr == "metric" or (attr == "reward" and getattr(fn, "_vf_weight", 1.0) == 0)

        return [_tried(fn, fn.__name__) if measures(fn) else fn for fn in original(self, attr)]

    return hooks


def _judges(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def judges(self: Any) -> list[Any]:
        found = original(self)
        for judge in found:
            if judge.config.weight == 0:
                judge.score = _tried(judge.score, judge.reward_name)
        return list(found)

    return judges


def _tried(measure: Callable[..., Any], name: str) -> Callable[..., Any]:
    """The same by name and signature; no values, which the library records as none, where it fails."""

    @functools.wraps(measure)
    async def call(*args: Any, **kwargs: Any) -> Any:
        try:
            value = measure(*args, **kwargs)
            if inspect.isawaitable(value):
                value = await value
            named = value if isinstance(value, Mapping) else {name: value}
            return {each: float(part) for each, part in named.items() if math.isfinite(part)}
        except Exception:
            return {}

    return call
