"""Sampler `replay`: puts prompts back that taught nothing when they were seen, and are forecast to teach now."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from retrain.kernel.config.keys import Table, key
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.types import Example
from retrain.tasks.prompts import order_from
from retrain.tasks.sampling import GroupOutcome, PromptChoice, PromptRequest
from retrain.verdicts.stats.teaching import RateBook, TeachingForecast


class Params(Table):
    """`[data.sampler_params]` of `replay`."""

    share: float = key(0.25, "Share of the prompts that may be put back.", ge=0.0, le=1.0)
    least_chance: float = key(0.3, "Forecast of teaching from which a prompt is put back.", ge=0.0, le=1.0)
    decay: float = key(TeachingForecast().decay, "Share of the evidence that is kept with each step.", gt=0.0, le=1.0)


class Replay:
    """The order of `uniform`, in which up to a share of each step's places goes to prompts that are put back.

    These are prompts whose latest group taught nothing, by falling forecast. The prompts they displace come in another
    pass.
    """

    def __init__(self, context: PluginContext, examples: Sequence[Example]) -> None:
        self._params = context.params if isinstance(context.params, Params) else Params()
        self._ids, self._seeds = [each.id for each in examples], context.seeds
        self._group_size = context.config.training.group_size
        self._book = RateBook(settings=TeachingForecast(decay=self._params.decay))
        self._idle: set[str] = set()  # prompts whose latest group taught nothing

    def choose(self, request: PromptRequest) -> list[PromptChoice]:
        places = int((request.cursor + request.count) * self._params.share) - int(request.cursor * self._params.share)
        idle = sorted(self._idle.difference(request.taken))
        chances_N = self._book.chances(idle, request.step, self._group_size)
        useful = sorted(zip(-chances_N, idle, strict=True))[:places]
        back = [each for chance, each in useful if -chance >= self._params.least_chance]
        rest = list(islice(self._others(request, {*back, *request.taken}), request.count - len(back)))
        chances = self._book.chances(chosen := back + rest, request.step, self._group_size).tolist()
        return [
            PromptChoice(example_id=each, chance=min(1.0, chance), is_uniform=at >= len(back))
            for at, (each, chance) in enumerate(zip(chosen, chances, strict=True))
        ]

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        for outcome in outcomes:
            self._book.observe(outcome.example_id, step, outcome.correct, outcome.judged)
            if outcome.is_informative:
                self._idle.discard(outcome.example_id)
            elif outcome.judged:
                self._idle.add(outcome.example_id)

    def state(self) -> dict[str, Any]:
        return {"book": self._book.state(), "idle": sorted(self._idle)}

    def restore(self, state: Mapping[str, Any]) -> None:
        self._book.restore(state["book"])
        self._idle = set(state["idle"])

    def _others(self, request: PromptRequest, without: set[str]) -> Iterator[str]:
        """Prompts from the request's position of the order of `uniform`, each once."""
        size, seen = len(self._ids), set(without)
        # Two passes in random order hold every prompt at least once, wherever the cursor is.
        for index, _ in order_from(self._seeds, size, request.cursor, 2 * size):
            if (each := self._ids[index]) not in seen:
                seen.add(each)
                yield each
