"""What a run is made of: its parts, and what it asks of the process that runs it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Algorithm, Credit
from retrain.kernel.contracts.backend import Backend
from retrain.kernel.contracts.pacing import Pacer
from retrain.kernel.contracts.tasks import Prompt, Prompts, Rollouts
from retrain.kernel.contracts.views import RunView
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.progress import Progress
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Group


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Parts:
    """Everything that a run is made of, apart from its records."""

    config: Config
    plugins: Plugins
    seeds: Seeds
    tokenizer: Any
    prompts: Prompts
    rollouts: Rollouts
    algorithm: Algorithm
    backend: Backend
    pacer: Pacer

    def close(self) -> None:
        """Release device memory and processes; safe to call twice."""
        self.rollouts.close()
        self.backend.close()


class Stops(Protocol):
    """When a run may be stopped: a request raises `StopRequested` in the run's thread, at once or after a shield."""

    def shield(self) -> AbstractContextManager[None]:
        """Nothing in the block is torn; a stop requested meanwhile is raised at its end."""

    def exposed(self, work: Callable[[], None]) -> None:
        """Do `work` as if there were no shield around it."""

    def settle(self) -> None:
        """The stop is being carried out: from here on only a second request interrupts."""

    def may_resume(self) -> None:
        """A valid checkpoint exists: leaving by force means "resume me" from now on."""


class Records(Protocol):
    """Where a run is written down; nothing is ever visible half-written."""

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
        """Every completion of a step with its credit, trained or not. The step's line comes last: then it is whole."""

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """A step's line in `metrics.jsonl`, or that of the evaluation before training."""

    def save(self, name: str, metrics: Mapping[str, Any]) -> Path:
        """Save the whole state as checkpoint `name`, with the last line's numbers; returns its folder."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Run:
    """A run in a process: its parts, its records, how it is stopped, how far it is, and how hooks see it."""

    parts: Parts
    records: Records
    stops: Stops
    progress: Progress
    view: RunView

    def notify(self, hook: str, **arguments: Any) -> Any:
        """Call a life-cycle hook about this run."""
        return self.parts.plugins.notify(hook, run=self.view, **arguments)

    def enter(self, step: int, phase: str) -> None:
        """Say which phase begins: `sampling`, `scoring`, `training`, `recording`, `eval` or `checkpoint`."""
        self.notify("retrain_phase", step=step, phase=phase)
