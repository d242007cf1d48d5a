"""What a run consists of: its parts, and the services that it needs from the process running it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Algorithm, Credit, Shaper
from retrain.kernel.contracts.backend import Backend, WarmUp
from retrain.kernel.contracts.pacing import Pacer
from retrain.kernel.contracts.tasks import Evaluation, Prompt, Prompts, Rollouts
from retrain.kernel.contracts.views import RunView, Watcher
from retrain.kernel.overlap import Sample, Serial, Train
from retrain.kernel.progress import Progress
from retrain.kernel.registry import Plugins, call
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Everything that a run consists of, except its records.

    `train` takes the rows of a step and does its optimizer steps on the backend, without publishing. It raises only
    while nothing has changed, or where the run has to end. `select` makes how a step is sampled from how one round of
    prompts is.
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

    path: Path

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
        """Append a step's line to `metrics.jsonl`, or that of the evaluation before training, after its records."""

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
        """Call a life-cycle hook about this run."""
        return self.parts.plugins.notify(hook, run=self.view, **arguments)

    def enter(self, step: int, phase: str) -> None:
        """Announce the phase that begins: `sampling`, `scoring`, `training`, `recording`, `eval` or `checkpoint`."""
        self.ask_watchers("phase", step, phase)

    def ask_watchers(self, method: str, *arguments: Any) -> list[Any]:
        """Call a method of every watcher; return the answers that are not None."""
        answers = [call(getattr(watcher, method), *arguments) for watcher in self.watchers]
        return [answer for answer in answers if answer is not None]
