"""The kernel's own plugin: its config tables, registered through the same door as anybody's."""

from __future__ import annotations

from collections.abc import Callable

from retrain.config import schema
from retrain.config.keys import Table, TableTraits
from retrain.hookspecs import hookimpl
from retrain.plugins.spec import PluginSpec

TABLES: tuple[tuple[str, type[Table], str], ...] = (
    ("backend", schema.BackendTable, ""),
    ("model", schema.ModelTable, ""),
    ("algorithm", schema.AlgorithmTable, ""),
    ("plugins", schema.PluginsTable, ""),
    ("training", schema.TrainingTable, ""),
    ("optimizer", schema.OptimizerTable, "optim_"),
    ("lora", schema.LoraTable, "lora_"),
    ("data", schema.DataTable, "data_"),
    ("scoring", schema.ScoringTable, "scoring_"),
    ("eval", schema.EvalTable, "eval_"),
    ("deadlines", schema.DeadlinesTable, "deadline_"),
    ("resume", schema.ResumeTable, "resume_"),
    ("logging", schema.LoggingTable, ""),
)


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    for name, model, prefix in TABLES:
        summary = (model.__doc__ or "").splitlines()[0]
        register(PluginSpec(name=name, summary=summary, factory=model, traits=TableTraits(flag_prefix=prefix)))
