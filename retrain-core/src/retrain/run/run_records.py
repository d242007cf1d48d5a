"""Writes the records of a run as it goes: completions, metrics lines, and checkpoints with its complete state."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.contracts.views import RunView
from retrain.kernel.errors import RetrainError
from retrain.kernel.parts import Parts
from retrain.kernel.progress import Progress
from retrain.kernel.types import Group
from retrain.records.checkpoints import prune, save_checkpoint
from retrain.records.completions import generation_records, step_summary, token_records
from retrain.records.folder import RunFolder

# A checkpoint of all weights is large: without a limit, a long run would fill the disk.
FULL_KEPT = 2
CONTROLLER = "controller"


@dataclass(frozen=True, slots=True, eq=False)
class RunRecords:
    """Writes the records of a run to its folder; see `retrain.kernel.parts.Records`."""

    _folder: RunFolder
    _parts: Parts
    _progress: Progress
    _view: RunView
    _give_up: Callable[[RetrainError], None]

    @property
    def path(self) -> Path:
        return self._folder.path

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
        self._notice_loss()
        tokenizer = self._parts.tokenizer
        generations = generation_records(step, prompts, groups, credit, tokenizer, is_trained=is_trained)
        self._folder.write_completions(step, step_summary(metrics, groups), generations, token_records(groups, credit))

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        self._notice_loss()
        if self._parts.evaluation and (records := self._parts.evaluation.records()):
            self._folder.write_evaluation(records)
        self._folder.write_metrics(metrics)

    def save(self, name: str, metrics: Mapping[str, Any]) -> Path:
        self._notice_loss(for_checkpoint=True)
        parts, training = self._parts, self._parts.config.training
        merged: dict[str, Any] = {}
        for added in self._parts.plugins.notify("retrain_save_state", run=self._view, name=name, folder=None):
            merged |= added or {}
        state = {
            "run_started": self._folder.started,
            "next_step": self._progress.step,
            "seed": self._parts.seeds.root,
            "progress": asdict(self._progress),
            "algorithm": dict(self._parts.algorithm.state()),
            "pacer": dict(self._parts.pacer.state()),
            "plugins": merged,
            **self._folder.sync(),
            "metrics": {key: value for key, value in metrics.items() if isinstance(value, int | float)},
        }
        path = save_checkpoint(self._folder.adapters, name, parts.backend.save, state)
        self._folder.hold_adapters()
        self._folder.write_state(self._summary(name, state))
        prune(
            self._folder.adapters,
            keep_last=kept_checkpoints(parts.config),
            keep_best=training.keep_best,
            metric=training.keep_best_metric,
        )
        return path

    def _notice_loss(self, *, for_checkpoint: bool = False) -> None:
        if failure := self._folder.leave_if_lost(for_checkpoint=for_checkpoint):
            self._give_up(failure)

    def _summary(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """The content of `trainer_state.json`, for other tools."""
        progress, training = self._progress, self._parts.config.training
        return {
            "step": progress.step - 1,
            "example_idx": progress.example_idx,
            "total_correct": progress.total_correct,
            "total_completions": progress.total_completions,
            "current_batch_size": self._parts.pacer.batch_size(progress.step),
            "current_group_size": training.group_size,
            "checkpoint_name": name,
            "sepa": state["algorithm"].get(CONTROLLER) or {},
        }


def kept_checkpoints(config: Config) -> int:
    """`[training] keep_last`; two if it is 0 and each holds all weights with their moments, 14 bytes a parameter."""
    return config.training.keep_last or (0 if config.model.lora_rank else FULL_KEPT)
