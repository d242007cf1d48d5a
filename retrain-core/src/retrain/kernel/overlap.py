"""Draws the completions of the coming step while a step is trained, where the backend can do both at once.

The coming step is drawn with the policy before the update that goes on: by one step, and never by more, its
completions are older than the policy that they train. Whether they are does not depend on who finishes first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain.kernel.contracts.serving import Measuring, SamplesAhead
from retrain.kernel.types import Group, TrainReport
from retrain.rooms.session.interrupts import Interrupts, StopRequested

if TYPE_CHECKING:
    from retrain.kernel.contracts.backend import Backend

Scored = tuple[tuple[Group, ...], Mapping[str, float]]  # the groups of a step, and what scoring says of itself


def samples_ahead(backend: Backend) -> bool:
    """Whether a backend samples while it trains, in this run."""
    return isinstance(backend, SamplesAhead) and backend.samples_ahead


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draw:
    """The drawing of a coming step of `size` prompts, to be called when it can be done."""

    size: int
    work: Callable[[], Scored]


class Ahead:
    """The completions of the next step, drawn during this one; nothing is, where the backend samples in its turn.

    Training moves to a thread of its own and drawing stays in the run's: it is drawing that calls tokenizers, rewards
    and environments, and that a signal may interrupt anywhere.
    """

    def __init__(self, backend: Backend, interrupts: Interrupts) -> None:
        self.is_on = samples_ahead(backend)
        self._backend = backend
        self._interrupts = interrupts
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training") if self.is_on else None
        self._version = 0
        self._size = 0
        self._drawn: Scored | Exception | None = None

    @property
    def size(self) -> int:
        """Prompts of the step that was drawn; 0 when none was."""
        return self._size

    def take(self) -> Scored | None:
        """What was drawn, once; None when nothing was, and what came in the way where something did."""
        drawn, self._drawn, self._size = self._drawn, None, 0
        if isinstance(drawn, Exception):
            raise drawn
        return drawn

    def forget(self) -> None:
        """Drop what was drawn."""
        self._drawn, self._size = None, 0

    def draw(self, draw: Draw) -> None:
        """Draw now. What fails is kept for `take`: it belongs to the step that it was drawn for, not to this one."""
        try:
            self._drawn = draw.work()
        except Exception as error:
            self._drawn = error
        self._size = draw.size

    def train(self, train: Callable[[], TrainReport], draw: Draw | None) -> TrainReport:
        """`train()`, and the drawing meanwhile where that can be done; to be called within a shield.

        Both have ended when it returns or raises. A stop tears the drawing, and the training where that allows it.
        """
        if self._thread is None:
            return train()
        training: Future[TrainReport] = self._thread.submit(train)
        try:
            if draw is not None:
                with suppress(StopRequested):  # the shield raises it again, when the training is accounted for
                    self._interrupts.exposed(lambda: self.draw(draw))
        finally:
            wait([training])
        return training.result()

    def measure_anew(self) -> None:
        """What the backend measured until now is about an evaluation, not about the step that is drawn next."""
        self.measured({})

    def measured(self, fields: Mapping[str, float]) -> Mapping[str, float]:
        """`fields` of a drawing with those that the backend measured; asked here, they go to the line of its step."""
        if not (self.is_on and isinstance(self._backend, Measuring)):
            return fields
        return {**fields, **self._backend.metrics()}

    def publish(self) -> None:
        """Let the policy as trained be the one that is drawn from."""
        self._version = self._backend.publish()

    def staleness(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """How many optimizer steps the completions are behind the policy that they are about to train."""
        if not self.is_on:
            return {}
        steps = [self._version - each.policy_version for group in groups for each in group.completions]
        return {"staleness_mean": sum(steps) / max(len(steps), 1), "staleness_max": max(steps, default=0)}

    def close(self) -> None:
        """End the thread; safe to call twice."""
        if self._thread is not None:
            self._thread.shutdown()
