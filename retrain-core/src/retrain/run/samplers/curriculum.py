"""Sampler `curriculum`: a window over the training pool in order of difficulty, moving to its other end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from itertools import islice
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from retrain.kernel.config.keys import Table, key
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Floats
from retrain.tasks.sampling import GroupOutcome, PromptChoice, PromptRequest

PARAMS = "data.sampler_params"
Ranks = NDArray[np.int64]


class Params(Table):
    """`[data.sampler_params]` of `curriculum`."""

    field: str = key("difficulty", "Column of the data that says how hard an example is.")
    levels: list[str] = key([], "Values of the field from easy to hard, where they are texts; empty = numbers.")
    order: Literal["easy_first", "hard_first"] = key("easy_first", "End of the order at which the window begins.")
    window: float = key(0.3, "Share of the pool in the window.", gt=0.0, le=1.0)
    grows: bool = key(False, "The window keeps where it began, and grows until it is the whole pool.")
    moves_by: Literal["step", "rate"] = key("step", "Moves on with each step, or each whose correct rate is target.")
    moves: int = key(0, "Moves until the window is at the end; 0 = [training] max_steps.", ge=0)
    target: float = key(0.7, "Least correct rate of a step after which the window moves by rate.", ge=0.0, le=1.0)


class Curriculum:
    """Draws uniformly from the window, and beyond its edges only as many as it lacks."""

    def __init__(self, ids: Sequence[str], ranks_N: Ranks, params: Params, moves: int, seeds: Seeds) -> None:
        """`ranks_N` are the places of the examples `ids` in the order of the course, from 0."""
        self._ids, self._ranks_N, self._params, self._moves, self._seeds = ids, ranks_N, params, moves, seeds
        self._moved = 0

    def choose(self, request: PromptRequest) -> list[PromptChoice]:
        """Choose `count` prompts of the window that are not taken; where it has fewer, the nearest to it as well."""
        low, high = self._window(request.step)
        outside_N = np.maximum(0, np.maximum(low - self._ranks_N, self._ranks_N - (high - 1)))
        chance_N = self._seeds.stream("sampler", request.step, request.cursor).random(len(self._ids))
        nearest = (self._ids[index] for index in np.lexsort((chance_N, outside_N)))
        free = (each for each in nearest if each not in request.taken)
        return [PromptChoice(example_id=each) for each in islice(free, request.count)]

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        judged = sum(outcome.judged for outcome in outcomes)
        correct = sum(outcome.correct for outcome in outcomes)
        self._moved += int(judged > 0 and correct >= self._params.target * judged)

    def state(self) -> dict[str, Any]:
        return {"moved": self._moved}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._moved = int(state["moved"])

    def _window(self, step: int) -> tuple[int, int]:
        size = len(self._ids)
        moved = step if self._params.moves_by == "step" else self._moved
        width = max(1, math.ceil(self._params.window * size))
        low = round((size - width) * min(1.0, moved / self._moves))
        return (0 if self._params.grows else low), low + width


def create(context: PluginContext, examples: Sequence[Example]) -> Curriculum:
    """The sampler `curriculum`; ConfigError where an example does not say how hard it is."""
    params = context.params if isinstance(context.params, Params) else Params()
    values_N = _difficulties(examples, params, context.config.place(PARAMS))
    order = np.argsort(values_N if params.order == "easy_first" else -values_N, kind="stable")
    ranks_N = np.empty(len(order), dtype=np.int64)
    ranks_N[order] = np.arange(len(order))
    moves = params.moves or max(1, context.config.training.max_steps - 1)
    return Curriculum([example.id for example in examples], ranks_N, params, moves, context.seeds)


def _difficulties(examples: Sequence[Example], params: Params, place: str) -> Floats:
    found = {example.id: _difficulty(example.info.get(params.field), params.levels) for example in examples}
    if lost := [example for example in examples if found[example.id] is None]:
        known = sorted({str(name) for example in examples[:1000] for name in example.info})
        near = get_close_matches(params.field, [name for name in known if name != params.field], n=1)
        value = lost[0].info.get(params.field)
        wanted = f"one of {params.levels}" if params.levels else "a number"
        what = f"{len(lost)} of {len(examples)} training examples have no {params.field!r} that is {wanted}"
        why = f"{lost[0].id!r} has {value!r:.80}; columns: {', '.join(known) or 'none'}"
        fix = f"did you mean {near[0]!r}?" if near else "name another column, or give levels for texts"
        raise ConfigError(Problem(code="data.no-difficulty", where=f"{place}.field", what=what, why=why, fix=fix))
    return np.array([found[example.id] for example in examples], dtype=np.float64)


def _difficulty(value: Any, levels: Sequence[str]) -> float | None:
    if levels:
        return float(levels.index(value)) if value in levels else None
    try:
        # CSV files have numbers as texts; `float(True)` would pass for a difficulty.
        number = math.nan if isinstance(value, bool | None) else float(value)
    except (TypeError, ValueError):
        return None
    return number if math.isfinite(number) else None
