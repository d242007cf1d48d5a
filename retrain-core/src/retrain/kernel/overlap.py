"""Overlap of sampling and training: where the backend can do both at once, the next step is sampled while one trains.

The next step is sampled with the policy before the update under way: its completions are one policy version behind,
never more, whichever finishes first. `Serial` is the null object: both take turns, and everything is on-policy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.serving import Measuring, overlaps_training
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import StopRequested
from retrain.kernel.parts import Stops
from retrain.kernel.progress import Clock
from retrain.kernel.types import Group, TrainBatch, TrainReport


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """The scored groups of a step, one per prompt, and the fields that sampling and scoring add to its line."""

    groups: tuple[Group, ...]
    metrics: Mapping[str, float]


Sample = Callable[[int, list[Prompt], Clock], Sampled]  # samples and scores the prompts of a step
Upcoming = Callable[[], tuple[int, list[Prompt]] | None]  # the next step and its prompts; None after the last one


def measured(backend: Backend) -> Mapping[str, float]:
    """What the backend measured since the previous call; empty when it measures nothing."""
    return backend.metrics() if isinstance(backend, Measuring) else {}


class Serial:
    """Sampling and training take turns."""

    is_on = False

    def __init__(self, backend: Backend, sample: Sample) -> None:
        self._backend = backend
        self._sample = sample

    @property
    def batch_size(self) -> int:
        """Number of prompts already sampled for the next step: 0."""
        return 0

    def collect(self, step: int, prompts: list[Prompt], clock: Clock) -> Sampled:
        """Sample the step's scored groups now."""
        return self._sample(step, prompts, clock)

    def train(self, batch: TrainBatch, clock: Clock, upcoming: Upcoming) -> TrainReport:
        """Train, then publish the trained policy."""
        with clock.timed("train"):
            report = self._backend.train(batch)
            self._backend.publish()
        return report

    def metrics(self) -> Mapping[str, float]:
        """What the backend measured in this step; read after training and around an evaluation.

        A resumed run does not repeat the evaluation before its first step, yet its line must be the same.
        """
        return measured(self._backend)

    def staleness(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """Nothing is stale."""
        return {}

    def start(self, clock: Clock, upcoming: Upcoming, *, is_restored: bool, is_sampled: bool) -> None:
        """Publish the policy of the checkpoint, if the run continues from one."""
        if is_restored:
            self._backend.publish()

    def drop(self) -> None:
        """Nothing was sampled in advance."""

    def close(self) -> None:
        """Nothing to release."""


class Overlapped:
    """The run's thread samples the next step while a separate thread trains this one.

    Sampling stays in the run's thread because it calls tokenizers, rewards and environments, and because a signal may
    interrupt it anywhere. `phase(step, name)` tells watchers what the run is waiting for.
    """

    is_on = True

    def __init__(self, backend: Backend, sample: Sample, stops: Stops, phase: Callable[[int, str], None]) -> None:
        self._backend = backend
        self._sample = sample
        self._stops = stops
        self._phase = phase
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._version = 0
        self._next: Sampled | Exception | None = None
        self.batch_size = 0

    def collect(self, step: int, prompts: list[Prompt], clock: Clock) -> Sampled:
        """Return what was sampled during the last step, or raise its error; without either, sample now."""
        sampled, self._next, self.batch_size = self._next, None, 0
        if isinstance(sampled, Exception):
            raise sampled
        return sampled or self._sample_measured(step, prompts, clock)

    def train(self, batch: TrainBatch, clock: Clock, upcoming: Upcoming) -> TrainReport:
        """Train while sampling the next step, then publish. Call it within a shield.

        Both have ended when it returns or raises. A stop interrupts the sampling, and the training where it allows it.
        """

        def work() -> TrainReport:
            with clock.timed("train"):
                return self._backend.train(batch)

        training: Future[TrainReport] = self._thread.submit(work)
        try:
            if planned := upcoming():
                with suppress(StopRequested):  # the shield raises it again once the training is recorded
                    self._stops.exposed(lambda: self._sample_next(*planned, clock))
        finally:
            wait([training])
        report = training.result()
        with clock.timed("train"):
            self._version = self._backend.publish()
        return report

    def metrics(self) -> Mapping[str, float]:
        """No fields: `_sample_measured` reads the backend, so that a field reaches the line of its own step."""
        return {}

    def staleness(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """How many optimizer steps the completions lag behind the policy that they are about to train."""
        steps = [self._version - each.policy_version for group in groups for each in group.completions]
        return {"staleness_mean": sum(steps) / max(len(steps), 1), "staleness_max": max(steps, default=0)}

    def start(self, clock: Clock, upcoming: Upcoming, *, is_restored: bool, is_sampled: bool) -> None:
        """Resample what an interrupted run had sampled, with the policy it used; then publish the current one."""
        if is_sampled and (planned := upcoming()):
            self._sample_next(*planned, clock)
        self._version = self._backend.publish()

    def drop(self) -> None:
        """Discard what was sampled, so that the step is sampled anew."""
        self._next, self.batch_size = None, 0

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._thread.shutdown()

    def _sample_next(self, step: int, prompts: list[Prompt], clock: Clock) -> None:
        """Sample in advance; keep an error for `collect`, because it belongs to the next step, not to this one."""
        try:
            self._next = self._sample_measured(step, prompts, clock)
        except Exception as error:
            self._next = error
        finally:
            self._phase(step - 1, "training")
        self.batch_size = len(prompts)

    def _sample_measured(self, step: int, prompts: list[Prompt], clock: Clock) -> Sampled:
        measured(self._backend)  # discard what it measured in an evaluation, which belongs to no step
        sampled = self._sample(step, prompts, clock)
        return replace(sampled, metrics={**sampled.metrics, **measured(self._backend)})


Overlap = Serial | Overlapped


def overlap_of(backend: Backend, sample: Sample, stops: Stops, phase: Callable[[int, str], None]) -> Overlap:
    """`Overlapped` if the backend declares that it samples while it trains, else `Serial`."""
    return Overlapped(backend, sample, stops, phase) if overlaps_training(backend) else Serial(backend, sample)
