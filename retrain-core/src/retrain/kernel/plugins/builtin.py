"""The kernel's own plugin: its config tables, registered as any plugin registers its own."""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.declared import PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

TABLES = (  # name, model in retrain.kernel.config.schema, prefix of its flags, summary
    ("backend", "BackendTable", "", "Who owns the policy, and where."),
    ("model", "ModelTable", "", "Which model is trained."),
    ("algorithm", "AlgorithmTable", "", "Credit, from rewards to numbers per token, and the loss."),
    ("plugins", "PluginsTable", "", "Search paths of dotted names."),
    ("training", "TrainingTable", "", "The size of a step and the number of steps."),
    ("optimizer", "OptimizerTable", "optim_", "AdamW and the gradient norm."),
    ("lora", "LoraTable", "lora_", "The adapter."),
    ("data", "DataTable", "data_", "The tasks, and the form of their prompts."),
    ("scoring", "ScoringTable", "scoring_", "Scoring of completions, in processes that can be killed."),
    ("eval", "EvalTable", "eval_", "Held-out evaluation on examples that are never trained on."),
    ("logging", "LoggingTable", "", "The run folder and the recorders."),
    ("resume", "ResumeTable", "resume_", "Continue an earlier run."),
)


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    for name, model, prefix, summary in TABLES:
        traits = TableTraits(flag_prefix=prefix)
        register(PluginSpec(name=name, summary=summary, factory=f"retrain.kernel.config.schema:{model}", traits=traits))
