"""Overlap of sampling and training: the coming step is sampled while a step trains, where the backend can do both.

The coming step is sampled with the policy before the update under way: its completions are one policy version behind,
never more, whoever finishes first. `Serial` is the null object: both take turns, and everything is on-policy.
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
Coming = Callable[[], tuple[int, list[Prompt]] | None]  # the step after, and its prompts; None after the last one


def measured(backend: Backend) -> Mapping[str, float]:
    """What the backend measured since it was last asked; nothing where it measures nothing."""
    return backend.metrics() if isinstance(backend, Measuring) else {}


class Serial:
    """Sampling and training take turns."""

    is_on = False

    def __init__(self, backend: Backend, sample: Sample) -> None:
        self._backend = backend
        self._sample = sample

    @property
    def batch_size(self) -> int:
        """Prompts of the step that is sampled already; 0 when none is."""
        return 0

    def collect(self, step: int, prompts: list[Prompt], clock: Clock) -> Sampled:
        """The step's scored groups, sampled now."""
        return self._sample(step, prompts, clock)

    def train(self, batch: TrainBatch, clock: Clock, coming: Coming) -> TrainReport:
        """Train, and publish the policy as trained."""
        with clock.timed("train"):
            report = self._backend.train(batch)
            self._backend.publish()
        return report

    def metrics(self) -> Mapping[str, float]:
        """What the backend measured in this step: asked after training, and around an evaluation.

        A resumed run does not repeat the evaluation before its first step, and its line must be the same.
        """
        return measured(self._backend)

    def staleness(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """Nothing is stale."""
        return {}

    def start(self, clock: Clock, coming: Coming, *, is_restored: bool, is_sampled: bool) -> None:
        """Sample from the policy of the checkpoint, where the run continues from one."""
        if is_restored:
            self._backend.publish()

    def drop(self) -> None:
        """Nothing was sampled before its time."""

    def close(self) -> None:
        """Nothing to release."""


class Overlapped:
    """The next step is sampled in the run's thread while a thread of its own trains this one.

    Sampling stays in the run's thread: it is sampling that calls tokenizers, rewards and environments, and that a
    signal may interrupt anywhere. `phase(step, name)` tells watchers what is waited for.
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
        """What was sampled during the last step, or raised then; sampled now where nothing was."""
        sampled, self._next, self.batch_size = self._next, None, 0
        if isinstance(sampled, Exception):
            raise sampled
        return sampled or self._sample_measured(step, prompts, clock)

    def train(self, batch: TrainBatch, clock: Clock, coming: Coming) -> TrainReport:
        """Train, and sample the coming step meanwhile; then publish. To be called within a shield.

        Both have ended when it returns or raises. A stop tears the sampling, and the training where that allows it.
        """

        def work() -> TrainReport:
            with clock.timed("train"):
                return self._backend.train(batch)

        training: Future[TrainReport] = self._thread.submit(work)
        try:
            if planned := coming():
                with suppress(StopRequested):  # the shield raises it again once the training is accounted for
                    self._stops.exposed(lambda: self._sample_next(*planned, clock))
        finally:
            wait([training])
        report = training.result()
        with clock.timed("train"):
            self._version = self._backend.publish()
        return report

    def metrics(self) -> Mapping[str, float]:
        """Nothing: the backend is asked around each sampling, so that a field goes to the line of its own step."""
        return {}

    def staleness(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """How many optimizer steps the completions are behind the policy that they are about to train."""
        steps = [self._version - each.policy_version for group in groups for each in group.completions]
        return {"staleness_mean": sum(steps) / max(len(steps), 1), "staleness_max": max(steps, default=0)}

    def start(self, clock: Clock, coming: Coming, *, is_restored: bool, is_sampled: bool) -> None:
        """Sample again what an interrupted run had sampled, with the policy of then; publish the one of now."""
        if is_sampled and (planned := coming()):
            self._sample_next(*planned, clock)
        self._version = self._backend.publish()

    def drop(self) -> None:
        """Forget what was sampled: the step is to be sampled anew."""
        self._next, self.batch_size = None, 0

    def close(self) -> None:
        """End the thread; safe to call twice."""
        self._thread.shutdown()

    def _sample_next(self, step: int, prompts: list[Prompt], clock: Clock) -> None:
        """What fails is kept for `collect`: it belongs to the step that it was sampled for, not to this one."""
        try:
            self._next = self._sample_measured(step, prompts, clock)
        except Exception as error:
            self._next = error
        finally:
            self._phase(step - 1, "training")
        self.batch_size = len(prompts)

    def _sample_measured(self, step: int, prompts: list[Prompt], clock: Clock) -> Sampled:
        measured(self._backend)  # until now it measured an evaluation, which belongs to no step
        sampled = self._sample(step, prompts, clock)
        return replace(sampled, metrics={**sampled.metrics, **measured(self._backend)})


Overlap = Serial | Overlapped


def overlap_of(backend: Backend, sample: Sample, stops: Stops, phase: Callable[[int, str], None]) -> Overlap:
    """`Overlapped` where the backend declares that it samples while it trains, else `Serial`."""
    return Overlapped(backend, sample, stops, phase) if overlaps_training(backend) else Serial(backend, sample)
