"""The keys of recorders under `[logging]`."""

from __future__ import annotations

from retrain.kernel.config.keys import Table, key
from retrain.kernel.declared import Kind


class TrackerKeys(Table):
    """Where Weights & Biases, Trackio and MLflow file the run."""

    project: str = key(
        "retrain",
        "Project of recorder trackio, experiment of mlflow.",
        free_on_resume=True,
        needs="recorder trackio or recorder mlflow",
    )

    wandb_project: str = key(
        "",
        "wandb project; setting it enables the recorder wandb.",
        selects=(Kind.RECORDER, "wandb"),
        free_on_resume=True,
    )
    wandb_run_name: str = key(
        "",
        "wandb run name, used by trackio and mlflow, too; empty = advantage+transform.",
        free_on_resume=True,
        needs="recorder wandb or recorder trackio or recorder mlflow",
    )
    wandb_entity: str = key("", "wandb entity.", free_on_resume=True, needs="recorder wandb")
    wandb_group: str = key(
        "",
        "wandb group; of trackio, too.",
        free_on_resume=True,
        needs="recorder wandb or recorder trackio",
    )
    wandb_tags: str = key(
        "",
        "wandb tags, comma-separated.",
        free_on_resume=True,
        needs="recorder wandb",
    )
    checkpoint_artifacts: bool = key(
        False,
        "wandb: keep each saved adapter as an artifact.",
        free_on_resume=True,
        needs="recorder wandb",
    )
