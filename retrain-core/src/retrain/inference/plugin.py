"""Registers `[inference]` and the engines that are servers."""

from __future__ import annotations

from collections.abc import Callable

from retrain.declared import EngineTraits, TableTraits
from retrain.hookspecs import hookimpl
from retrain.plugins.spec import PluginSpec

ENGINES = {
    "vllm": "A vLLM server: token ids both ways, adapters loaded while it runs.",
    "sglang": "An SGLang server, through its own /generate.",
    "mlx": "The server of MLX-LM, on Apple silicon or a CPU.",
    "max": "A MAX server (max serve): ids back through the texts of tokens, exactly or not at all.",
    "openai": "Any server with /v1/completions that shows its tokens and takes PEFT adapters.",
}


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    """The table of the inference engine."""
    traits = TableTraits(flag_prefix="inference_")
    factory = "retrain.inference.table:InferenceTable"
    register(PluginSpec(name="inference", summary="Which engine draws completions.", factory=factory, traits=traits))


@hookimpl
def retrain_register_inference_engines(register: Callable[[PluginSpec], None]) -> None:
    """One engine per kind of server. Batching on a server changes rounding, so no seed repeats its completions."""
    for name, summary in ENGINES.items():
        factory = f"retrain.inference.{name}:create_engine"
        register(PluginSpec(name=name, summary=summary, factory=factory, traits=EngineTraits()))
