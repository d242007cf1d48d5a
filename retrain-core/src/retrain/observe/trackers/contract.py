"""The contract of a recorder, and the keys of recorders under `[logging]`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from retrain.kernel.config.keys import Table, free
from retrain.kernel.declared import Kind


class Recorder(Protocol):
    """Receives the records of a run, in addition to the JSONL files that are always written.

    An exception in a method is reported once, by the recorder's name, and never stops training. `state`, `restore` and
    `checkpoint` are optional: a recorder without them keeps nothing across a resume and receives no adapters.
    """

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the result of `state`; called only on a resume, before `start`."""

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        """Called once per session with the content of `run.json`, secrets hidden, and the run's folder.

        After an exception here only `state` and `finish` are still called.
        """

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Receive each line of `metrics.jsonl` after it is written."""

    def checkpoint(self, folder: Path, name: str) -> None:
        """Receive each saved checkpoint: its complete folder, PEFT adapter included; read it only during the call."""

    def state(self) -> Mapping[str, Any]:
        """Return everything that a resume needs, as JSON; called at each checkpoint."""

    def finish(self, error: BaseException | None = None) -> None:
        """Called once, however the run ends: `error` is what ended it, None if it reached its last step."""


class TrackerKeys(Table):
    """Project, group and name of the run in Weights & Biases, Trackio and MLflow."""

    project: str = free(
        "retrain", "Project of recorder trackio, experiment of mlflow.", needs="recorder trackio or recorder mlflow"
    )
    wandb_project: str = free(
        "", "wandb project; setting it enables the recorder wandb.", selects=(Kind.RECORDER, "wandb")
    )
    wandb_run_name: str = free(
        "",
        "wandb run name, used by trackio and mlflow, too; empty = advantage+transform.",
        needs="recorder wandb or recorder trackio or recorder mlflow",
    )
    wandb_entity: str = free("", "wandb entity.", needs="recorder wandb")
    wandb_group: str = free("", "wandb group; of trackio, too.", needs="recorder wandb or recorder trackio")
    wandb_tags: str = free("", "wandb tags, comma-separated.", needs="recorder wandb")
    checkpoint_artifacts: bool = free(False, "wandb: keep each saved adapter as an artifact.", needs="recorder wandb")
