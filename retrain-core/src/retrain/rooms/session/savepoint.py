"""Writes the whole state of a run into a checkpoint, and brings it back."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.kernel.contracts.views import RunView
from retrain.kernel.overlap import samples_ahead
from retrain.kernel.progress import Progress
from retrain.rooms.session.assemble import Parts
from retrain.rooms.session.records.checkpoints import Checkpoint, prune, save_checkpoint
from retrain.rooms.session.records.folder import RunFolder


def save_run(
    name: str, parts: Parts, folder: RunFolder, progress: Progress, view: RunView, metrics: Mapping[str, Any]
) -> Path:
    """Save policy, optimizer, controllers, plugins, recorders, counters and the sizes of the record files.

    Then `trainer_state.json` says so, and older checkpoints are pruned.
    """
    training = parts.config.training
    merged: dict[str, Any] = {}
    for state in parts.plugins.notify("retrain_save_state", run=view):
        merged |= state or {}
    numbers = {key: value for key, value in metrics.items() if isinstance(value, int | float)}
    state = {
        "run_started": folder.started,
        "next_step": progress.step,
        "seed": parts.seeds.root,
        "progress": progress.as_state(),
        "controller": dict(parts.controller.state()) if parts.controller else None,
        "pacer": dict(parts.pacer.state()) if parts.pacer else None,
        "plugins": merged,
        "recorders": parts.recorders.state(),
        "health": parts.health.state(),
        "record_sizes": folder.sync(),
        "metrics": numbers,
    }
    path = save_checkpoint(folder.adapters, name, parts.backend.save, state)
    folder.write_state(
        {
            "step": progress.step - 1,
            "example_idx": progress.example_idx,
            "total_correct": progress.total_correct,
            "total_completions": progress.total_completions,
            "current_batch_size": parts.pacer.batch_size(progress.step) if parts.pacer else training.batch_size,
            "current_group_size": training.group_size,
            "checkpoint_name": name,
            "sepa": state["controller"] or {},
        }
    )
    parts.recorders.checkpoint(path, name)
    prune(folder.adapters, keep_last=training.keep_last, keep_best=training.keep_best, metric=training.keep_best_metric)
    return path


def restore_run(parts: Parts, checkpoint: Checkpoint, view: RunView) -> None:
    """Bring back everything but counters and records: policy and optimizer, controller, health monitors, plugins.

    A backend that samples ahead is not published yet: what had been drawn ahead is drawn again before.
    """
    parts.backend.load(checkpoint.path)
    if not samples_ahead(parts.backend):
        parts.backend.publish()
    state = checkpoint.state
    if parts.controller and state["controller"] is not None:
        parts.controller.restore(state["controller"])
    if parts.pacer and state.get("pacer") is not None:
        parts.pacer.restore(state["pacer"])
    parts.health.restore(state.get("health", {}))
    parts.plugins.notify("retrain_load_state", run=view, state=state["plugins"])


def progress_of(checkpoint: Checkpoint | None) -> Progress:
    """The counters of a checkpoint, or those of a beginning."""
    return Progress.of_state(checkpoint.state["progress"]) if checkpoint else Progress()
