"""The keys of recorders under `[logging]`."""

from __future__ import annotations

from functools import partial

from retrain.kernel.config.keys import Table, key
from retrain.kernel.declared import Kind

_free = partial(key, free_on_resume=True)  # a resumed run may have another value


class TrackerKeys(Table):
    """Where Weights & Biases, Trackio and MLflow file the run."""

    project: str = _free(
        "retrain", "Project of recorder trackio, experiment of mlflow.", needs="recorder trackio or recorder mlflow"
    )
    wandb_project: str = _free(
        "", "wandb project; setting it enables the recorder wandb.", selects=(Kind.RECORDER, "wandb")
    )
    wandb_run_name: str = _free(
        "",
        "wandb run name, used by trackio and mlflow, too; empty = advantage+transform.",
        needs="recorder wandb or recorder trackio or recorder mlflow",
    )
    wandb_entity: str = _free("", "wandb entity.", needs="recorder wandb")
    wandb_group: str = _free("", "wandb group; of trackio, too.", needs="recorder wandb or recorder trackio")
    wandb_tags: str = _free("", "wandb tags, comma-separated.", needs="recorder wandb")
    checkpoint_artifacts: bool = _free(False, "wandb: keep each saved adapter as an artifact.", needs="recorder wandb")
