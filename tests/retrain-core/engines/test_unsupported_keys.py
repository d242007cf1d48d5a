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


def configured(**inference: str) -> Config:
    return Config(tables={"inference": InferenceTable.model_validate(inference)})


class Halfway:
    """A third-party engine that supports one of the keys."""

    @hookimpl
    def retrain_register_inference_engines(self, register) -> None:
        traits = EngineTraits(honours=frozenset({"kv_cache_dtype"}))
        register(PluginSpec(name="halfway", summary="", factory="nowhere:f", traits=traits))
        register(PluginSpec(name="silent", summary="", factory="nowhere:f"))


@pytest.mark.parametrize("engine", sorted(ENGINES))
def test_a_server_refuses_each_with_what_to_do_instead(engine: str, plugins: Plugins) -> None:
    assert {"logprobs", *CHANGED} == set(KEYS)
    problems = unsupported_keys(configured(engine=engine, **CHANGED), plugins, ENGINES)
    assert [problem.where for problem in problems] == [f"[inference] {name} (default)" for name in CHANGED]
    for problem in problems:
        assert f"the server of engine {engine!r}" in problem.what
        assert problem.fix.startswith("remove it, and ")
    assert unsupported_keys(configured(engine=engine, logprobs="trainer"), plugins, ENGINES) == []


def test_the_flag_of_a_known_server_is_named(plugins: Plugins) -> None:
    (problem,) = unsupported_keys(configured(engine="vllm", kv_cache_dtype="fp8"), plugins, ENGINES)
    assert problem.what.startswith("kv_cache_dtype = 'fp8' would have no effect")
    assert problem.fix == "remove it, and start the server with --kv-cache-dtype"


def test_an_engine_of_somebody_else_refuses_what_its_traits_do_not_name(plugins: Plugins) -> None:
    plugins.add(Halfway(), Owner(distribution="halfway", source="test"))
    problems = unsupported_keys(configured(engine="halfway", **CHANGED), plugins, ENGINES)
    assert [problem.where for problem in problems] == [
        "[inference] attention_kernel (default)",
        "[inference] dtype (default)",
    ]
    assert "engine 'halfway' does not support it" in problems[0].what
    # one without traits says nothing about itself, and one that is missing is told of elsewhere
    assert unsupported_keys(configured(engine="silent", **CHANGED), plugins, ENGINES) == []
    assert unsupported_keys(configured(engine="nobody's", **CHANGED), plugins, ENGINES) == []


def test_an_engine_that_samples_with_the_training_model_recomputes_nothing(plugins: Plugins) -> None:
    (problem,) = unsupported_keys(configured(logprobs="trainer"), plugins, ENGINES)
    assert problem.what == "logprobs = 'trainer' would have no effect: engine 'pytorch' does not support it"


def test_the_loader_asks(plugins: Plugins) -> None:
    tables = {"inference": InferenceTable(engine="vllm", dtype="fp8"), "backend": schema.BackendTable()}
    _, problems = check(Config(tables=tables), plugins, registered_tables(plugins))
    assert "[inference] dtype (default)" in [problem.where for problem in problems]
