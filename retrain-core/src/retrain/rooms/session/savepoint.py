"""Writes the records of a run and its whole state into checkpoints, and brings that state back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.contracts.views import RunView
from retrain.kernel.parts import Parts
from retrain.kernel.progress import Progress
from retrain.kernel.types import Group
from retrain.rooms.session.records.checkpoints import Checkpoint, prune, save_checkpoint
from retrain.rooms.session.records.completions import generation_records, step_summary, token_records
from retrain.rooms.session.records.folder import RunFolder

FORMER_PLUGIN_STATES = ("recorders", "health")  # stood beside `plugins` before these rooms were plugins
CONTROLLER = "controller"


class RunRecords:
    """The records of a run in its folder; see `retrain.kernel.parts.Records`."""

    def __init__(self, folder: RunFolder, parts: Parts, progress: Progress, view: RunView) -> None:
        self.path = folder.path
        self._folder = folder
        self._parts = parts
        self._progress = progress
        self._view = view

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
        """Texts, tokens and summary of a step."""
        tokenizer = self._parts.tokenizer
        generations = generation_records(step, prompts, groups, credit, tokenizer, is_trained=is_trained)
        self._folder.write_completions(step, step_summary(metrics, groups), generations, token_records(groups, credit))

    def write_metrics(self, metrics: Mapping[str, Any]) -> None:
        """One line of `metrics.jsonl`."""
        self._folder.write_metrics(metrics)

    def save(self, name: str, metrics: Mapping[str, Any]) -> Path:
        """Save policy, optimizer, algorithm, pacer, plugins, counters and the sizes of the record files.

        Then `trainer_state.json` says so, and older checkpoints are pruned.
        """
        parts, training = self._parts, self._parts.config.training
        state = self._state(metrics)
        path = save_checkpoint(self._folder.adapters, name, parts.backend.save, state)
        self._folder.write_state(self._summary(name, state))
        prune(
            self._folder.adapters,
            keep_last=training.keep_last,
            keep_best=training.keep_best,
            metric=training.keep_best_metric,
        )
        return path

    def _state(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        merged: dict[str, Any] = {}
        for added in self._parts.plugins.notify("retrain_save_state", run=self._view):
            merged |= added or {}
        return {
            "run_started": self._folder.started,
            "next_step": self._progress.step,
            "seed": self._parts.seeds.root,
            "progress": self._progress.as_state(),
            "algorithm": dict(self._parts.algorithm.state()),
            "pacer": dict(self._parts.pacer.state()),
            "plugins": merged,
            "record_sizes": self._folder.sync(),
            "metrics": {key: value for key, value in metrics.items() if isinstance(value, int | float)},
        }

    def _summary(self, name: str, state: Mapping[str, Any]) -> dict[str, Any]:
        """`trainer_state.json`: what other tools may read of the last checkpoint."""
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


def restore_run(parts: Parts, checkpoint: Checkpoint, view: RunView) -> None:
    """Bring back everything but counters and records: policy and optimizer, algorithm, pacer, plugins.

    The policy is not published yet: the run does, once it has sampled again what was sampled before an update.
    """
    parts.backend.load(checkpoint.path)
    if state := algorithm_state(checkpoint.state):
        parts.algorithm.restore(state)
    if pacer := checkpoint.state.get("pacer"):
        parts.pacer.restore(pacer)
    parts.plugins.notify("retrain_load_state", run=view, state=plugin_state(checkpoint.state))


def algorithm_state(state: Mapping[str, Any]) -> Mapping[str, Any]:
    """State of the algorithm in a checkpoint, also of one written when the run itself owned the controller."""
    if "algorithm" in state:
        found: Mapping[str, Any] = state["algorithm"]
        return found
    return {CONTROLLER: state[CONTROLLER]} if state.get(CONTROLLER) is not None else {}


def plugin_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """State of plugins in a checkpoint by name, also of one written when some of them were parts of the run."""
    former = {name: state[name] for name in FORMER_PLUGIN_STATES if state.get(name)}
    return former | dict(state["plugins"])


def progress_of(checkpoint: Checkpoint | None) -> Progress:
    """The counters of a checkpoint, or those of a beginning."""
    return Progress.of_state(checkpoint.state["progress"]) if checkpoint else Progress()
