"""Overlap of sampling and training: where the backend can do both at once, the next step is sampled while one trains.

The next step is sampled with the policy before the updates under way: its completions are one publication behind,
never more, whichever finishes first. `buffered` is the same for more steps than one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from typing import Protocol, runtime_checkable

from retrain.kernel.errors import StopRequested
from retrain.kernel.overlap import Planned, Sample, Sampled, Serial, Upcoming, measured
from retrain.kernel.parts import Run
from retrain.kernel.progress import Clock
from retrain.kernel.types import Group, TrainBatch, TrainReport


@runtime_checkable
class OverlapsTraining(Protocol):
    """A backend that can sample while it trains, because it samples from a separate copy of the policy.

    If `overlaps_training` is True, `train` runs in a thread of its own. Meanwhile the run's thread calls `sample` for
    the next step, which uses the last published policy, the one before that update; and `metrics`, if it exists, for
    that step's line. Nothing else is called until both have ended. So that a resumed run can resample those
    completions, `save` also writes the policy before the last `publish`, with its version; after `load`, `sample` uses
    that one until `publish`.
    """

    overlaps_training: bool


@runtime_checkable
class KeepsVersions(Protocol):
    """A backend that samples while it trains, from any of the policies that it published last.

    It does so where `[training] max_staleness` = n is above 1. `sample` and `use_version` are then called in a thread
    of their own, everything else in the run's. `publish` keeps a copy of the trained policy, beside the n before it,
    and leaves `sample` as it is; `use_version` chooses the one that `sample` uses, by the number that `publish`
    returned. Neither is called during `sample`. `save` writes the copies too, and `load` brings them back.
    """

    def use_version(self, version: int) -> None:
        """Sample from this version from now on; BackendError when it is not among those kept."""


@runtime_checkable
class SamplesAhead(Protocol):
    """The former name of `OverlapsTraining` and of its attribute; still supported."""

    samples_ahead: bool


def overlaps_training(backend: object) -> bool:
    """Whether a backend samples while it trains, in this run."""
    if isinstance(backend, OverlapsTraining):
        return backend.overlaps_training
    return isinstance(backend, SamplesAhead) and backend.samples_ahead


class OffPolicy(Serial):
    """What the ways to overlap share: fields of the line, and a reading of the backend for each batch of samples."""

    def __init__(self, run: Run, sample: Sample) -> None:
        super().__init__(run.parts.backend, run.parts.train, sample)
        self._run = run
        self._trained_from = 0  # version before the step under way

    def metrics(self) -> Mapping[str, float]:
        """No fields: `_sample_measured` reads the backend, so that a field reaches the line of its own step."""
        return {}

    def staleness(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """How many optimizer steps the completions lag behind the policy that they are about to train."""
        steps = [self._version - each.policy_version for group in groups for each in group.completions]
        return {"staleness_mean": sum(steps) / max(len(steps), 1), "staleness_max": max(steps, default=0)}

    def _sample_measured(self, planned: Planned, clock: Clock) -> Sampled:
        measured(self._backend)  # discard what it measured in an evaluation, which belongs to no step
        sampled = self._sample(planned, clock)
        return replace(sampled, metrics={**sampled.metrics, **measured(self._backend)})


class Overlapped(OffPolicy):
    """The run's thread samples the next step while a separate thread trains this one.

    Sampling stays in the run's thread because it calls tokenizers, rewards and environments, and because a signal may
    interrupt it anywhere.
    """

    def __init__(self, run: Run, sample: Sample) -> None:
        super().__init__(run, sample)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._next: Sampled | Exception | None = None
        self.batch_size = 0

    def collect(self, planned: Planned, clock: Clock) -> Sampled:
        """Return what was sampled during the last step, or raise its error; without either, sample now."""
        sampled, self._next, self.batch_size = self._next, None, 0
        if isinstance(sampled, Exception):
            raise sampled
        return sampled or self._sample_measured(planned, clock)

    def train(self, batch: TrainBatch, clock: Clock, upcoming: Upcoming) -> TrainReport:
        """Train while sampling the next step, then publish. Call it within a shield.

        Both have ended when it returns or raises. A stop interrupts the sampling, and the training where it allows it.
        """

        def work() -> TrainReport:
            with clock.timed("train"):
                return self._train(batch)

        training: Future[TrainReport] = self._thread.submit(work)
        try:
            if planned := upcoming():
                with suppress(StopRequested):  # the shield raises it again once the training is recorded
                    self._run.stops.exposed(lambda: self._sample_next(planned, clock))
        finally:
            wait([training])
        report = training.result()
        with clock.timed("train"):
            self._trained_from, self._version = self._version, self._backend.publish()
        return report

    def finish(self, clock: Clock, *, has_trained: bool) -> dict[str, float]:
        """Timing fields of the step's line, and how long sampling and training overlapped."""
        self._run.progress.versions = [self._trained_from] if has_trained else []
        fields = clock.fields()
        trained = [(begin, end) for phase, begin, end in clock.spans if phase == "train"]
        sampled = [(begin, end) for phase, begin, end in clock.spans if phase == "sample"]
        return fields | {
            "overlap_time_s": overlap_s(trained, sampled),
            "sampler_idle_time_s": fields["step_time_s"] - clock.phase_s["sample"],
            "trainer_idle_time_s": fields["step_time_s"] - clock.phase_s["train"],
        }

    def start(self, clock: Clock, upcoming: Upcoming, *, is_restored: bool) -> None:
        """Resample what an interrupted run had sampled, with the policy it used; then publish the current one."""
        if self._run.progress.versions and (planned := upcoming()):
            self._sample_next(planned, clock)
        self._version = self._backend.publish()

    def drop(self) -> None:
        """Discard what was sampled, so that the step is sampled anew."""
        self._next, self.batch_size = None, 0
        self._run.progress.versions = []

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._thread.shutdown()

    def _sample_next(self, planned: Planned, clock: Clock) -> None:
        """Sample in advance; keep an error for `collect`, because it belongs to the next step, not to this one."""
        try:
            self._next = self._sample_measured(planned, clock)
        except Exception as error:
            self._next = error
        finally:
            self._run.enter(planned.step - 1, "training")
        self.batch_size = planned.batch_size


Span = tuple[float, float]  # begin and end, by the same clock


def overlap_s(some: Sequence[Span], others: Sequence[Span]) -> float:
    """Seconds that lie in a span of both."""
    return math.fsum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)
