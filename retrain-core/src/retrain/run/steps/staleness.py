"""How far sampling may be ahead of training, `[training] max_staleness`: who can do it, and what corrects for it."""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread

from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Capabilities
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.overlap import Planned, Sample, Sampled, Serial, Upcoming
from retrain.kernel.parts import Run
from retrain.kernel.progress import Clock
from retrain.run.steps.overlapped import KeepsVersions, OffPolicy, Overlapped, Span, overlap_s, overlaps_training

KEY = "training.max_staleness"
AUTO = -1  # one step where the backend samples and trains at once, else none
LOG = logging.getLogger("retrain")


def arrangement(config: Config, backend: object) -> Callable[[Run, Sample], Serial]:
    """How sampling and training follow each other in a run with this backend; ConfigError for more than it can do."""
    most, is_able = config.value(KEY, AUTO), overlaps_training(backend)
    if most == 0 or (most == AUTO and not is_able):
        return lambda run, sample: Serial(run.parts.backend, run.parts.train, sample)
    if not is_able:
        raise ConfigError(_too_many(config, 0))
    if most in (AUTO, 1):
        return Overlapped
    if not isinstance(backend, KeepsVersions):
        raise ConfigError(_too_many(config, 1))
    LOG.info("Sampling runs up to %d steps ahead: %s.", most, correction(config))
    return partial(Buffered, backend=backend, most=most)


def steps_ahead(config: Config, backend: object) -> int:
    """How many steps the prompts of a step are drawn ahead: step s is drawn when step s - 1 - this is over."""
    most = config.value(KEY, AUTO)
    return int(overlaps_training(backend)) if most == AUTO else most


def staleness_problems(config: Config, capabilities: Capabilities | None) -> Iterator[Problem]:
    """More steps than the backend declares, and what chooses by the step before where there are several."""
    most = config.value(KEY, AUTO)
    if capabilities is not None and most > capabilities.max_staleness:
        yield _too_many(config, capabilities.max_staleness)
    if most > 1 and config.backpressure.enabled:
        what = f"max_staleness = {most} does not go with back pressure"
        why = "it chooses the prompts of a step by the time of the one before, which is not over when they are sampled"
        fix = "set max_staleness = 1, or [backpressure] enabled = false"
        yield Problem(where=config.place(KEY), what=what, why=why, fix=fix)


def meaning(config: Config) -> str:
    """What the key makes of this run, for `retrain explain`; empty where it has its default."""
    most = config.value(KEY, AUTO)
    if most == AUTO:
        return ""
    if most == 0:
        return "none: sampling and training take turns"
    steps = f"{most} step{'s' if most > 1 else ''}"
    return f"step s is sampled with the policy after step s - {most + 1}, {steps} behind; {correction(config)}"


def correction(config: Config) -> str:
    """What corrects for completions of an older policy, and what bounds that."""
    ratio = "each token is weighted by p now / p when sampled, which does not correct for how likely its prefix is now"
    bounds: list[float] = config.algorithm.is_bounds
    if bounds:
        mode = config.algorithm.is_mode
        return f"the importance weight within is_bounds = {bounds} (is_mode = {mode}) corrects for it"
    if config.algorithm.tis_cap > 0.0:
        return f"the importance weight, at most tis_cap = {config.algorithm.tis_cap:g}, corrects for it"
    if config.algorithm.loss == "importance_sampling":
        return f"{ratio}; nothing bounds it: set [algorithm] is_bounds = [0.0, 2.0], or a loss that clips"
    return f"{ratio}; only the loss {config.algorithm.loss!r} bounds it, and [algorithm] is_bounds is not set"


def _too_many(config: Config, largest: int) -> Problem:
    most, backend = config.value(KEY, AUTO), config.backend.backend
    what = f"max_staleness = {most}: backend {backend!r} can do at most {largest}"
    why = "" if largest else "it samples and trains in turn"
    return Problem(where=config.place(KEY), what=what, why=why, fix=f"set max_staleness = {largest}")


# Overlap of more steps than one: a thread samples up to n steps ahead of the one that trains.
#
# The rule, with n = `[training] max_staleness` and P_s the policy after s steps: **step s is sampled with P_{s-n}**,
# and the first n steps with P_0. It depends on no clock, so a seed gives the same run however fast either half is.
# Sampling of step s + n may begin once step s - 1 is trained; up to n batches wait between the two, and a slow one is
# absorbed.


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A step to sample, and the policy version to sample it with."""

    step: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """A sampled step, and the clock of its sampling and scoring."""

    sampled: Sampled
    clock: Clock


class Buffered(OffPolicy):
    """The run's thread trains, records and evaluates; another samples and scores what the run's thread orders.

    Orders and batches pass through two queues, in the order of the steps. At most n + 1 steps are ordered and not yet
    trained, which bounds what waits. An error of sampling travels as the batch of its step, and ends the thread.
    """

    def __init__(self, run: Run, sample: Sample, backend: KeepsVersions, most: int) -> None:
        super().__init__(run, sample)
        self._policies, self._most = backend, most
        self._orders: SimpleQueue[Order | None] = SimpleQueue()  # None: there will be no more
        self._batches: SimpleQueue[Batch | BaseException] = SimpleQueue()
        self._turn: SimpleQueue[None] = SimpleQueue()  # holds one item, which the thread that samples takes
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
        """The batch of this step, once it is there, or the error of sampling it."""
        self._run.enter(planned.step, "sampling")
        batch = self._batches.get()
        if isinstance(batch, BaseException):
            raise batch
        clock.phase_s |= {phase: batch.clock.phase_s[phase] for phase in ("sample", "score")}
        return batch.sampled

    def finish(self, clock: Clock, *, has_trained: bool) -> dict[str, float]:
        """Order the next step, with the policy that there is now; returns the timing fields of the line."""
        progress = self._run.progress
        progress.versions = [*progress.versions, self._trained_from][-self._most :]
        self._trained_from = self._version
        self._order(self._version)
        fields = clock.fields()
        step = (clock.started, clock.started + fields["step_time_s"])
        while self._busy and self._busy[0][1] < clock.started:
            self._busy.popleft()
        busy: list[Span] = [(begin, end) for begin, end in tuple(self._busy)]
        trained = [(begin, end) for phase, begin, end in clock.spans if phase == "train"]
        return fields | {
            "overlap_time_s": overlap_s(trained, busy),
            "sampler_idle_time_s": fields["step_time_s"] - overlap_s([step], busy),
            "trainer_idle_time_s": fields["step_time_s"] - clock.phase_s["train"],
        }

    @contextmanager
    def evaluation(self) -> Iterator[Mapping[str, float]]:
        """Let the batch under way come to its end, then sample from the current policy; no fields, see `metrics`."""
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
        """End the thread after the batch under way; safe to call twice."""
        self._is_closed = True
        self._orders.put(None)
        self._turn.put(None)  # an evaluation may have been stopped just after it took the turn
        self._may_sample.set()
        if self._thread:
            self._thread.join()

    def _order(self, version: int) -> None:
        self._ordered += 1
        if self._ordered < self._run.parts.config.training.max_steps:
            self._orders.put(Order(step=self._ordered, version=version))

    def _work(self, planned: Planned) -> None:
        """Sample what is ordered, each step from the prompt on at which the one before it ended."""
        try:
            while order := self._orders.get():
                self._may_sample.wait()
                self._turn.get()
                try:
                    if self._is_closed:
                        return
                    planned = replace(planned, step=order.step, is_announced=False)
                    batch = self._sample_with(order.version, planned)
                finally:
                    self._turn.put(None)
                self._batches.put(batch)
                planned = replace(planned, cursor=planned.cursor + len(batch.sampled.prompts))
        except BaseException as error:
            self._batches.put(error)

    def _sample_with(self, version: int, planned: Planned) -> Batch:
        clock = Clock()
        self._busy.append(span := [clock.started, math.inf])
        self._policies.use_version(version)
        sampled = self._sample_measured(planned, clock)
        span[1] = time.perf_counter()
        return Batch(sampled=sampled, clock=clock)
