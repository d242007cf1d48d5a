"""Keys that an engine does not support are refused before anything starts, never ignored."""

from __future__ import annotations

import pytest

from retrain.engines import ENGINES
from retrain.engines.table import KEYS, unsupported_keys
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import EngineTraits, PluginSpec
from retrain.kernel.hooks import hookimpl
from retrain.kernel.registry import Owner, Plugins
from retrain.run.check import check
from retrain.run.tables import registered_tables

CHANGED = {"attention_kernel": "triton", "dtype": "bf16", "kv_cache_dtype": "int8"}


class Halfway:
    """A third-party engine that supports one of the keys, and one that declares nothing."""

    @hookimpl
    def retrain_register_inference_engines(self, register) -> None:
        traits = EngineTraits(honours=frozenset({"kv_cache_dtype"}))
        register(PluginSpec(name="halfway", summary="", factory="nowhere:f", traits=traits))
        register(PluginSpec(name="silent", summary="", factory="nowhere:f"))


@pytest.mark.parametrize(
    ("engine", "keys", "code", "refused"),
    [
        *((engine, CHANGED, "engine.option-of-server", list(CHANGED)) for engine in sorted(ENGINES)),
        *((engine, {"logprobs": "trainer"}, "", []) for engine in sorted(ENGINES)),
        ("halfway", CHANGED, "engine.unsupported-key", ["attention_kernel", "dtype"]),
        ("pytorch", {"logprobs": "trainer"}, "engine.unsupported-key", ["logprobs"]),
        ("silent", CHANGED, "", []),
        ("missing", CHANGED, "", []),  # reported by the registry
    ],
)
def test_an_engine_refuses_each_key_that_it_does_not_support(
    plugins: Plugins, engine: str, keys: dict[str, str], code: str, refused: list[str]
) -> None:
    assert {"logprobs", *CHANGED} == set(KEYS)
    plugins.add(Halfway(), Owner(distribution="halfway", source="test"))
    config = Config(tables={"inference": InferenceTable.model_validate({"engine": engine, **keys})})
    found = [(problem.code, problem.where) for problem in unsupported_keys(config, plugins, ENGINES)]
    assert found == [(code, f"[inference] {name} (default)") for name in refused]


def test_the_check_of_a_run_names_the_flag_of_a_known_server(plugins: Plugins) -> None:
    tables = {"inference": InferenceTable(engine="vllm", dtype="fp8"), "backend": schema.BackendTable()}
    _, problems = check(Config(tables=tables), plugins, registered_tables(plugins))
    (fix,) = [problem.fix for problem in problems if problem.code == "engine.option-of-server"]
    assert fix == "remove it, and start the server with --dtype or --quantization"
