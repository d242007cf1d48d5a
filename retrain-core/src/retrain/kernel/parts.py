"""The parts of a run, the services that it needs from its process, and sampling and training in turn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Algorithm, Credit, Shaper
from retrain.kernel.contracts.backend import Backend, Measuring, WarmUp
from retrain.kernel.contracts.tasks import Evaluation, Prompt, Prompts, Rollouts
from retrain.kernel.contracts.views import Pacer, RunView, Watcher
from retrain.kernel.errors import NonFiniteError
from retrain.kernel.progress import Clock, Progress
from retrain.kernel.registry import Plugins, call
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Group, TrainBatch, TrainReport


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """Prompts to sample for a step: `batch_size` from position `cursor` on, after `round` other rounds of them."""

    step: int
    cursor: int
    batch_size: int
    round: int = 0
    # Hooks and phases belong to the run's thread, so a plan of another thread is not announced.
    is_announced: bool = True

    @property
    def label(self) -> str:
        """Name of the files about these prompts."""
        return f"step_{self.step:06d}" + (f"_round_{self.round}" if self.round else "")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sampled:
    """Prompts, a scored group for each, and the fields that sampling and scoring add to the step's line.

    With `error` there is no group: the completions could not be sampled, and the step is rejected.
    """

    prompts: Sequence[Prompt]
    groups: tuple[Group, ...] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: NonFiniteError | None = None


Sample = Callable[[Planned, Clock], Sampled]
Train = Callable[[TrainBatch], TrainReport]
Upcoming = Callable[[], Planned | None]  # the next step; None after the last one


def measured(backend: Backend) -> Mapping[str, float]:
    """Measurements of the backend since the previous call; empty when it takes none."""
    return backend.metrics() if isinstance(backend, Measuring) else {}


class Serial:
    """Sampling and training take turns. `batch_size` is the number of prompts already sampled for the next step: 0."""

    batch_size = 0

    def __init__(self, backend: Backend, train: Train, sample: Sample) -> None:
        self._backend, self._train, self._sample, self._version = backend, train, sample, 0

    def collect(self, planned: Planned, clock: Clock) -> Sampled:
        """Return the step's scored groups, sampled now."""
        return self._sample(planned, clock)

    def train(self, batch: TrainBatch, clock: Clock, upcoming: Upcoming) -> TrainReport:
        """Train, then publish the trained policy."""
        with clock.timed("train"):
            report = self._train(batch)
            self._version = self._backend.publish()
        return report

    def metrics(self) -> Mapping[str, float]:
        return measured(self._backend)

    @contextmanager
    def evaluation(self) -> Iterator[Mapping[str, float]]:
        """Yield the step's measurements; those taken within the block belong to no step."""
        yield self.metrics()
        self.metrics()

    def staleness(self, groups: tuple[Group, ...]) -> dict[str, float]:
        """Fields on how far the completions lag behind the policy: none."""
        return {}

    def finish(self, clock: Clock, *, has_trained: bool) -> dict[str, float]:
        """Note that the step is over, trained or not; return the timing fields of its line."""
        return clock.fields()

    def start(self, clock: Clock, upcoming: Upcoming, *, is_restored: bool) -> None:
        """Publish the policy of the checkpoint, if the run continues from one."""
        if is_restored:
            self._backend.publish()

    def drop(self) -> None:
        """Discard samples taken in advance: none."""

    def close(self) -> None:
        """Release threads: none."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Everything that a run consists of, except its records.

    `train` takes the rows of a step and does its optimizer steps on the backend, without publishing. It raises only
    while nothing has changed, or where the run has to end. `select` makes the sampling of a step from a round's.
    """

    config: Config
    plugins: Plugins
    seeds: Seeds
    tokenizer: Any
    prompts: Prompts
    rollouts: Rollouts
    algorithm: Algorithm
    backend: Backend
    pacer: Pacer
    train: Train
    overlap: Callable[[Run, Sample], Serial]
    select: Callable[[Sample], Sample]
    shapers: tuple[Shaper, ...] = ()
    warm_up: WarmUp | None = None
    evaluation: Evaluation | None = None

    def close(self) -> None:
        """Release device memory and processes; safe to call twice."""
        # The backend is closed last, because the others may still sample from it.
        if self.evaluation:
            self.evaluation.close()
        self.rollouts.close()
        self.backend.close()


class Stops(Protocol):
    """Stops a run: a request raises `StopRequested` in the run's thread, at once or when the shield ends."""

    def shield(self) -> AbstractContextManager[None]:
        """Protect the block from interruption; a stop requested meanwhile is raised at its end."""

    def exposed(self, work: Callable[[], None]) -> None:
        """Run `work` as if no shield surrounded it."""

    def acknowledge(self) -> None:
        """Mark the stop as being carried out: from here on only a second request interrupts."""

    def may_resume(self) -> None:
        """Note that a valid checkpoint exists: from now on a forced exit reports that the run can be resumed."""


class Records(Protocol):
    """Writes a run to disk; nothing is ever visible half-written."""

    @property
    def path(self) -> Path: ...

    def write_completions(
        self,
        step: int,
        prompts: Sequence[Prompt],
        groups: Sequence[Group],
        credit: Credit,
        *,
        is_trained: bool,
        metrics: Mapping[str, Any],
    ) -> None:
        """Write a step's completions with their credit, trained or not. Its line comes last and marks it complete."""

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append to `metrics.jsonl`, after its records, a step's line or the one of the evaluation before training."""

    def save(self, name: str, metrics: Mapping[str, Any]) -> Path:
        """Save the complete state as checkpoint `name`, with the last line's metrics; return its folder."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A run in a process: its parts, records, progress and watchers, how to stop it, and the view that hooks get."""

    parts: Parts
    records: Records
    stops: Stops
    progress: Progress
    view: RunView
    watchers: tuple[Watcher, ...] = ()

    def notify(self, hook: str, **arguments: Any) -> Any:
        return self.parts.plugins.notify(hook, run=self.view, **arguments)

    def enter(self, step: int, phase: str) -> None:
        """Announce the phase that begins: `sampling`, `scoring`, `training`, `recording`, `eval` or `checkpoint`."""
        self.ask_watchers("phase", step, phase)

    def ask_watchers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every watcher; return the answers that are not None."""
        answers = [call(getattr(watcher, method), *arguments) for watcher in self.watchers]
        return [answer for answer in answers if answer is not None]
