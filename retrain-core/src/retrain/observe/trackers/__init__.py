"""Recorders in addition to the JSONL files: Weights & Biases, TensorBoard, Trackio and MLflow."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext

RECORDERS = {
    "wandb": "Weights & Biases (extra `wandb`); on when [logging] wandb_project is set.",
    "tensorboard": "Event files in <log_dir>/tensorboard (extra `tensorboard`).",
    "trackio": "Trackio, on this machine or where its variables say (extra `trackio`).",
    "mlflow": "MLflow: MLFLOW_TRACKING_URI, or a database in <log_dir> (extra `mlflow`).",
}


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    factory = "retrain.observe.trackers.contract:TrackerKeys"
    traits = TableTraits(extends=True)
    register(PluginSpec(name="logging", summary="Project and name of the run there.", factory=factory, traits=traits))


@hookimpl
def retrain_register_recorders(register: Callable[[PluginSpec], None]) -> None:
    for name, summary in RECORDERS.items():
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.observe.trackers.{name}:build"))


@hookimpl
def retrain_watch_run(context: PluginContext) -> object | None:
    table: Any = context.config.logging
    if not table.recorders and not table.wandb_project:
        return None
    from retrain.observe.trackers.recording import watch_run  # only a run with a recorder needs it

    return watch_run(context)
