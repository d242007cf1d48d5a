"""Sampler `thompson`: the prompts that would teach most if each rate were a draw from its posterior.

Thompson sampling (Thompson 1933), for the choice of prompts as in arXiv:2507.04632. `RateBook` holds the rates and
their posteriors, as for the signal account. No importance weight makes up for the choice: the objective is the mean
reward over the prompts as drawn, more often prompts that are neither always nor never answered. A prompt's chance of
being drawn has no closed form here, so no exact weight exists. Only the uniform share keeps each prompt's chance above
zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.kernel.config.keys import Table, key
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.types import Example
from retrain.tasks.sampling import GroupOutcome, PromptChoice, PromptRequest
from retrain.verdicts.stats.teaching import RateBook, TeachingForecast, teaching


class Params(Table):
    """`[data.sampler_params]` of `thompson`."""

    explore: float = key(0.1, "Share of the prompts that is drawn with equal probability instead.", ge=0.0, le=1.0)
    decay: float = key(0.98, "Share of a completion's evidence that is kept with each step.", gt=0.0, le=1.0)


class Thompson:
    """Draws a rate p of each prompt left, and takes those with the largest 1 - p^G - (1-p)^G; ties by lot."""

    def __init__(self, context: PluginContext, examples: Sequence[Example]) -> None:
        params = context.params if isinstance(context.params, Params) else Params()
        self._ids = np.array([example.id for example in examples], dtype=object)
        self._place = {example_id: index for index, example_id in enumerate(self._ids)}
        self._seeds, self._group_size, self._explore = context.seeds, context.config.training.group_size, params.explore
        self._book = RateBook(settings=TeachingForecast(decay=params.decay))

    def choose(self, request: PromptRequest) -> list[PromptChoice]:
        """Choose the uniform share first, from all that are left, then the best of the others."""
        rng = self._seeds.stream("sampler", request.step, request.cursor)
        is_left_N = np.ones(len(self._ids), dtype=bool)
        is_left_N[[self._place[each] for each in request.taken]] = False
        left = rng.permutation(np.flatnonzero(is_left_N))
        # Rounded at random, so that the share is right on average for small steps too.
        explored = int(self._explore * request.count + rng.random())
        rest = left[explored:]
        rates = self._book.draw(self._ids[rest].tolist(), request.step, rng)
        best = np.argsort(-teaching(rates, self._group_size), kind="stable")[: request.count - explored]
        chosen: list[str] = [*self._ids[left[:explored]], *self._ids[rest[best]]]
        chances = self._book.chances(chosen, request.step, self._group_size)
        return [
            PromptChoice(example_id=each, chance=min(float(chance), 1.0), is_uniform=number < explored)
            for number, (each, chance) in enumerate(zip(chosen, chances, strict=True))
        ]

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        for outcome in outcomes:
            self._book.observe(outcome.example_id, step, outcome.correct, outcome.judged)

    def state(self) -> Mapping[str, Any]:
        return self._book.state()

    def restore(self, state: Mapping[str, Any]) -> None:
        self._book.restore(state)
