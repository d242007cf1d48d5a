"""Keys of `[inference]` that only some engines support: refused where they would have no effect."""

from __future__ import annotations

from collections.abc import Collection

from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import EngineTraits, Kind
from retrain.kernel.errors import Problem
from retrain.kernel.registry import Plugins

KEYS = ("logprobs", "attention_kernel", "dtype", "kv_cache_dtype")
FLAGS = {
    "attention_kernel": "--attention-backend",
    "dtype": "--dtype or --quantization",
    "kv_cache_dtype": "--kv-cache-dtype",
}
OWN_FLAGS = {"vllm": FLAGS, "sglang": FLAGS, "max": {"dtype": "--quantization-encoding"}}  # the known ones


def problems_of(config: Config, plugins: Plugins, servers: Collection[str]) -> list[Problem]:
    """One problem per key that is not at its default and that the traits of the engine do not list.

    `servers` names the engines that are servers, which have options of their own for some of these keys.
    A backend that samples without an engine refuses them itself.
    """
    table = config.inference
    entries = plugins.find(Kind.INFERENCE_ENGINE, table.engine)
    traits = entries[0].spec.traits if len(entries) == 1 else None
    if not isinstance(traits, EngineTraits):
        return []
    default = InferenceTable()
    changed = [name for name in KEYS if getattr(table, name) != getattr(default, name)]
    return [
        _refused(config, table, name, is_server=table.engine in servers)
        for name in changed
        if name not in traits.honours
    ]


def _refused(config: Config, table: InferenceTable, name: str, *, is_server: bool) -> Problem:
    engine = table.engine
    what = f"{name} = {getattr(table, name)!r} would have no effect: "
    if not is_server:
        what += f"engine {engine!r} does not support it"
        fix = f"remove it, or keep the default {getattr(InferenceTable(), name)!r}"
    else:
        what += f"the server of engine {engine!r} sets it when it starts"
        flag = OWN_FLAGS.get(engine, {}).get(name)
        fix = f"remove it, and {f'start the server with {flag}' if flag else 'set it where the server starts'}"
    return Problem(where=config.place(f"inference.{name}"), what=what, fix=fix)
