"""Overlap of sampling and training: coming steps are sampled while one trains, one step ahead or several.

`Overlapped` samples the next step with the policy before the updates under way: its completions are one publication
behind, never more, whichever finishes first.

`Buffered` does so for n = `[training] max_staleness` steps. With P_s the policy after s steps, **step s is sampled with
P_{s-n}**, and the first n steps with P_0. This depends on no clock, so a seed gives the same run however fast either
half is. Sampling of step s + n may begin once step s - 1 is trained; up to n batches wait between the two.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.errors import ConfigError, StopRequested
from retrain.kernel.parts import Planned, Run, Sample, Sampled, Serial, Upcoming, measured
from retrain.kernel.progress import Clock
from retrain.kernel.types import Group, TrainBatch, TrainReport
from retrain.run.steps.staleness import AUTO, KeepsVersions, overlaps_training, too_many

LOG = logging.getLogger("retrain")
Span = tuple[float, float]  # begin and end, by the same clock


class OffPolicy(Serial):
    """Common base of both overlaps: fields of the line, and a reading of the backend for each batch of samples."""

    def __init__(self, run: Run, sample: Sample) -> None:
        super().__init__(run.parts.backend, run.parts.train, sample)
        self._run = run
        self._trained_from = 0  # version before the step under way

    def metrics(self) -> Mapping[str, float]:
        """Return no fields: `_sample_measured` reads the backend, so that a field reaches the line of its step."""
        return {}

    def staleness(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """Optimizer steps by which the completions lag behind the policy that they are about to train."""
        steps = [self._version - each.policy_version for group in groups for each in group.completions]
        return {"staleness_mean": sum(steps) / max(len(steps), 1), "staleness_max": max(steps, default=0)}

    def _sample_measured(self, planned: Planned, clock: Clock) -> Sampled:
        # Read and dropped: measurements of an evaluation belong to no step.
        measured(self._backend)
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
        """Return the samples drawn during the last step, or raise its error; without either, sample now."""
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
                # The shield raises it again once the training is recorded.
                with suppress(StopRequested):
                    self._run.stops.exposed(lambda: self._sample_next(planned, clock))
        finally:
            wait([training])
        report = training.result()
        with clock.timed("train"):
            self._trained_from, self._version = self._version, self._backend.publish()
        return report

    def finish(self, clock: Clock, *, has_trained: bool) -> dict[str, float]:
        self._run.progress.versions = [self._trained_from] if has_trained else []
        sampled = [(begin, end) for phase, begin, end in clock.spans if phase == "sample"]
        return _times(clock, sampled, clock.phase_s["sample"])

    def start(self, clock: Clock, upcoming: Upcoming, *, is_restored: bool) -> None:
        """Repeat the samples of an interrupted run, with the policy it used; then publish the current one."""
        if self._run.progress.versions and (planned := upcoming()):
            self._sample_next(planned, clock)
        self._version = self._backend.publish()

    def drop(self) -> None:
        self._next, self.batch_size = None, 0
        self._run.progress.versions = []

    def close(self) -> None:
        self._thread.shutdown()

    def _sample_next(self, planned: Planned, clock: Clock) -> None:
        """Sample in advance; keep an error for `collect`, because it belongs to the next step, not to this one."""
        try:
            self._next = self._sample_measured(planned, clock)
        except Exception as error:
            self._next = error
        finally:
            # Sampling has announced the next step, but the rest of this one is training.
            self._run.enter(planned.step - 1, "training")
        self.batch_size = planned.batch_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    sampled: Sampled
    clock: Clock


class Buffered(OffPolicy):
    """The run's thread trains, records and evaluates; another samples and scores the steps that it orders.

    Orders and batches pass through two queues, in the order of the steps. At most n + 1 steps are ordered and not yet
    trained, so that no more wait. An error of sampling travels as the batch of its step, and ends the thread.
    """

    def __init__(self, run: Run, sample: Sample, backend: KeepsVersions, most: int) -> None:
        super().__init__(run, sample)
        self._policies, self._most = backend, most
        self._orders: SimpleQueue[Order | None] = SimpleQueue()  # None: there will be no more
        self._batches: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._turn: SimpleQueue[None] = SimpleQueue()  # holds one item, taken by the thread that samples
        self._turn.put(None)
        self._may_sample, self._is_closed = Event(), False
        self._may_sample.set()
        self._busy: deque[list[float]] = deque()  # begin and end of each batch, infinity while it lasts
        self._ordered = 0  # the step ordered last
        self._thread: Thread | None = None

    def start(self, clock: Clock, upcoming: Upcoming, *, is_restored: bool) -> None:
        """Publish the current policy, and order the first n + 1 steps: after a resume, with the policies of before."""
        self._version = self._trained_from = self._backend.publish()
        if (first := upcoming()) is None:
            return
        versions = [*self._run.progress.versions, self._version]
        self._ordered = first.step - 1
        for place in range(len(versions) - 1 - self._most, len(versions)):
            self._order(versions[max(0, place)])
        self._thread = Thread(target=self._work, args=(first,), name="sampling", daemon=True)
        self._thread.start()

    def collect(self, planned: Planned, clock: Clock) -> Sampled:
        self._run.enter(planned.step, "sampling")
        batch = self._batches.get()
        if isinstance(batch, BaseException):
            raise batch
        clock.phase_s |= {phase: batch.clock.phase_s[phase] for phase in ("sample", "score")}
        return batch.sampled

    def finish(self, clock: Clock, *, has_trained: bool) -> dict[str, float]:
        """Order the next step, with the current policy; return the timing fields of the line."""
        progress = self._run.progress
        progress.versions = [*progress.versions, self._trained_from][-self._most :]
        self._trained_from = self._version
        self._order(self._version)
        while self._busy and self._busy[0][1] < clock.started:
            self._busy.popleft()
        # A copy, because the sampling thread appends meanwhile.
        busy: list[Span] = [(begin, end) for begin, end in tuple(self._busy)]
        return _times(clock, busy)

    @contextmanager
    def evaluation(self) -> Iterator[Mapping[str, float]]:
        """Let the batch under way end, then sample from the current policy; no fields, see `metrics`."""
        self._may_sample.clear()
        try:
            self._turn.get()
            try:
                self._policies.use_version(self._version)
                yield {}
            finally:
                self._turn.put(None)
        finally:
            self._may_sample.set()

    def close(self) -> None:
        """End the thread after the batch under way."""
        self._is_closed = True
        self._orders.put(None)
        # An evaluation may have been stopped just after it took the turn; without this, the thread would wait for ever.
        self._turn.put(None)
        self._may_sample.set()
        if self._thread:
            self._thread.join()

    def _order(self, version: int) -> None:
        self._ordered += 1
        if self._ordered < self._run.parts.config.training.max_steps:
            self._orders.put(Order(step=self._ordered, version=version))

    def _work(self, planned: Planned) -> None:
        """Sample the ordered steps, each from the prompt on at which the one before it ended."""
        try:
            while order := self._orders.get():
                self._may_sample.wait()
                self._turn.get()
                try:
                    if self._is_closed:
                        return
                    planned = replace(planned, step=order.step, is_announced=False)
                    clock = Clock()
                    self._busy.append(span := [clock.started, math.inf])
                    self._policies.use_version(order.version)
                    sampled = self._sample_measured(planned, clock)
                    span[1] = time.perf_counter()
                    batch = Batch(sampled=sampled, clock=clock)
                finally:
                    self._turn.put(None)
                self._batches.put(batch)
                planned = replace(planned, cursor=planned.cursor + len(batch.sampled.prompts))
        except BaseException as error:
            # Raised again by `collect`, in the run's thread.
            self._batches.put(error)


def _times(clock: Clock, sampled: Sequence[Span], sampling_s: float | None = None) -> dict[str, float]:
    """Timing fields of a step that sampled in these spans, for `sampling_s` or as long as they lie in the step."""
    fields = clock.fields()
    if sampling_s is None:
        sampling_s = overlap_s([(clock.started, clock.started + fields["step_time_s"])], sampled)
    trained = [(begin, end) for phase, begin, end in clock.spans if phase == "train"]
    return fields | {
        "overlap_time_s": overlap_s(trained, sampled),
        "sampler_idle_time_s": fields["step_time_s"] - sampling_s,
        "trainer_idle_time_s": fields["step_time_s"] - clock.phase_s["train"],
    }


def overlap_s(some: Sequence[Span], others: Sequence[Span]) -> float:
    return math.fsum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in some for b in others)


def arrangement(config: Config, backend: Backend) -> Callable[[Run, Sample], OffPolicy]:
    """The overlap that `[training] max_staleness` and the backend allow; ConfigError for more than it supports."""
    most = config.training.max_staleness
    if not overlaps_training(backend):
        raise ConfigError(too_many(config, 0))
    if most in (AUTO, 1):
        return Overlapped
    if not isinstance(backend, KeepsVersions):
        raise ConfigError(too_many(config, 1))
    LOG.info("Sampling runs up to %d steps ahead: %s.", most, correction(config))
    return partial(Buffered, backend=backend, most=most)


def meaning(config: Config) -> str:
    """Meaning of the key for this run, for `retrain explain`; empty at its default."""
    most = config.training.max_staleness
    if most == AUTO:
        return ""
    if most == 0:
        return "none: sampling and training take turns"
    steps = f"{most} step{'s' if most > 1 else ''}"
    return f"step s is sampled with the policy after step s - {most + 1}, {steps} behind; {correction(config)}"


def correction(config: Config) -> str:
    """The correction for completions of an older policy, and its bounds."""
    ratio = "each token is weighted by p now / p when sampled; the changed probability of its prefix is not corrected"
    bounds: list[float] = config.algorithm.is_bounds
    if bounds:
        mode = config.algorithm.is_mode
        return f"the importance weight within is_bounds = {bounds} (is_mode = {mode}) corrects for it"
    if config.algorithm.tis_cap > 0.0:
        return f"the importance weight, at most tis_cap = {config.algorithm.tis_cap:g}, corrects for it"
    if config.algorithm.loss == "importance_sampling":
        return f"{ratio}; nothing bounds it: set [algorithm] is_bounds = [0.0, 2.0], or a loss that clips"
    return f"{ratio}; only the loss {config.algorithm.loss!r} bounds it, and [algorithm] is_bounds is not set"
