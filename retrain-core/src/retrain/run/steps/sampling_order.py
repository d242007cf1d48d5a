"""The prompts of a run in the order of its `[data] sampler`, whose every choice is checked.

Samplers that go through the pool in passes, such as `uniform`, need no more than this; `learned_order` is the order of
those that learn from outcomes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import PluginError, Problem, RetrainError
from retrain.tasks.prompts import PromptPool
from retrain.tasks.sampling import GroupOutcome, PromptChoice, PromptRequest, Sampler


@dataclass(slots=True)
class NamedSampler:
    """A sampler whose faults become a PluginError with its name; `observed` is the last step whose outcomes it knows.

    `place` is where the configuration names it.
    """

    name: str
    place: str
    sampler: Sampler
    observed: int = -1

    @property
    def in_passes(self) -> bool:
        """True if it goes through the pool in passes, whatever the outcomes."""
        return bool(getattr(self.sampler, "in_passes", False))

    def choose(self, request: PromptRequest, known: Collection[str]) -> list[PromptChoice]:
        """Choose among the examples `known`; the choice is checked."""
        with self._named("choose"):
            found = list(self.sampler.choose(request))
            self._check(found, request, known)
        return found

    def observe(self, step: int, outcomes: Sequence[GroupOutcome]) -> None:
        with self._named("observe"):
            self.sampler.observe(step, outcomes)
        self.observed = step

    def state(self) -> dict[str, Any]:
        """Return the sampler's state as a checkpoint has it, a copy that shares nothing with the sampler."""
        with self._named("state"):
            state: dict[str, Any] = json.loads(json.dumps(dict(self.sampler.state())))
        return state

    def restore(self, state: Mapping[str, Any], observed: int) -> None:
        with self._named("restore"):
            self.sampler.restore(state)
        self.observed = observed

    def _check(self, found: Sequence[PromptChoice], request: PromptRequest, known: Collection[str]) -> None:
        ids = [choice.example_id for choice in found]
        wrong = next((each for each in ids if each not in known), None)
        chances = [choice.chance for choice in found if choice.chance is not None]
        step = f"for step {request.step}"
        if wrong is not None:
            what, fix = f"chose {wrong!r:.80}, not a training example, {step}", "choose only from the given examples"
            raise self._error(code="sampler.unknown-example", what=what, fix=fix)
        if len(ids) != request.count:
            what, fix = f"chose {len(ids)} prompts instead of {request.count}, {step}", "choose `request.count`"
            raise self._error(code="sampler.wrong-count", what=what, fix=fix)
        if not self.in_passes and (len(set(ids)) < len(ids) or request.taken.intersection(ids)):
            what, fix = f"chose a prompt twice, {step}", "choose each prompt once, and none of `request.taken`"
            raise self._error(code="sampler.repeated-choice", what=what, fix=fix)
        if not all(math.isfinite(chance) and 0.0 <= chance <= 1.0 for chance in chances):
            what, fix = f"gave a probability outside [0, 1], {step}", "give a probability, or None"
            raise self._error(code="sampler.bad-chance", what=what, fix=fix)

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        try:
            yield
        except RetrainError:
            raise
        except Exception as error:
            what = f"{method}() raised {type(error).__name__}: {error}"
            fix = "repair that sampler, or use another"
            raise self._error(code="plugin.raised", what=what, fix=fix) from error

    def _error(self, *, code: str, what: str, fix: str) -> PluginError:
        return PluginError(Problem(code=code, where=self.place, what=f"sampler {self.name!r} {what}", fix=fix))


class PassOrder:
    """The order of a sampler that goes through the pool in passes; see `Prompts`. It has no state."""

    def __init__(self, pool: PromptPool, sampler: NamedSampler) -> None:
        self._sampler, self._prompts = sampler, {prompt.example.id: prompt for prompt in pool.train}

    def draw_ahead(self, steps: int) -> None:
        """No outcome matters, so sampling ahead changes nothing."""

    def draw(self, cursor: int, count: int, step: int) -> list[Prompt]:
        chosen = self._sampler.choose(PromptRequest(step=step, cursor=cursor, count=count), self._prompts)
        return [
            replace(self._prompts[choice.example_id], epoch=at // len(self._prompts))
            for at, choice in enumerate(chosen, start=cursor)
        ]
