"""A trained model at work: evaluated, talked to, sampled, served, merged, exported, called by agents.

Begin with `subject.py` (a run, checkpoint or model by its name) and `opened.py` (loaded, ready to answer). Imports
nothing of campaigns, and nothing of what reads finished runs but the ledger.
"""

from __future__ import annotations

from collections.abc import Callable

from retrain.kernel.hooks import hookimpl
from retrain.kernel.plugin_spec import PluginSpec

COMMANDS = (
    ("chat", "Talk to a run, an adapter or a model."),
    ("sample", "Sample completions of prompts from a file."),
    ("export", "Write a trained model for transformers, GGUF, MLX or vLLM, or push it to the hub."),
    ("serve", "Serve a run, an adapter or a model to any client of the OpenAI API."),
)


@hookimpl
def retrain_register_commands(register: Callable[[PluginSpec], None]) -> None:
    """One command for each use."""
    for name, summary in COMMANDS:
        factory = f"retrain.use.{name}_command:command"
        register(PluginSpec(name=name, summary=summary, factory=factory, traits="use"))
