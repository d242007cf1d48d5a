"""The contract of a sampler: it chooses the prompts of each step from the outcomes of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.types import Example
from retrain.tasks.prompts import order_from


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRequest:
    """A request for `count` >= 1 distinct prompts for `step`, none of them in `taken`, and at most as many as are left.

    `cursor` is the number of prompts that the run drew before them. `taken` holds the ids that the step has already; it
    is empty again each time the step has used the whole pool.
    """

    step: int
    cursor: int
    count: int
    taken: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptChoice:
    """A prompt that a sampler chose.

    `chance`, in [0, 1], is its forecast that the group teaches; None = no forecast. `is_uniform`: drawn with equal
    probability from all prompts that were left, to explore.
    """

    example_id: str
    chance: float | None = None
    is_uniform: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOutcome:
    """The outcome of a group: `correct` of `judged` completions, and whether it teaches: its rewards differ."""

    example_id: str
    correct: int
    judged: int
    is_informative: bool


class Sampler(Protocol):
    """Chooses the prompts of each step from the training pool; it never sees the held-out examples.

    The factory is `f(context, examples)`, with the training pool in a fixed order. Prompts sampled ahead of training
    are chosen before the latest steps are over, so `observe` comes late: `choose` for step s sees the steps up to s - 1
    in turn, s - 2 where one step overlaps, s - 1 - n under `[training] max_staleness` = n, and always exactly these,
    resumed or not. With sampling ahead the factory is called again: one sampler chooses, one waits for checkpoints.

    Optional: `in_passes`, True where the prompt at each `cursor` is fixed and every pass over the pool takes each
    example once; such a sampler ignores `taken` and observes nothing, and completions are keyed by the pass. For all
    others they are keyed by the cursor, so an example that is drawn again gets new completions.
    """

    def choose(self, request: PromptRequest) -> Sequence[PromptChoice]:
        """Return the prompts, in order. Idempotent: a retry or a resume repeats the call and must get the same prompts.

        Draw at random only from `context.seeds.stream("sampler", request.step, request.cursor)`.
        """

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        """Learn from a completed step, in order of the steps. One that could not be sampled is left out."""

    def state(self) -> Mapping[str, Any]:
        """Return everything that a resume needs, as JSON."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the value that `state` returned."""


class Uniform:
    """The default: the pool in a seeded order, new in each pass and independent of outcomes and batch size."""

    in_passes = True

    def __init__(self, context: PluginContext, examples: Sequence[Example]) -> None:
        self._ids, self._seeds = [example.id for example in examples], context.seeds

    def choose(self, request: PromptRequest) -> list[PromptChoice]:
        order = order_from(self._seeds, len(self._ids), request.cursor, request.count)
        return [PromptChoice(example_id=self._ids[index], is_uniform=True) for index, _ in order]

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None: ...

    def state(self) -> Mapping[str, Any]:
        return {}

    def restore(self, state: Mapping[str, Any]) -> None: ...
