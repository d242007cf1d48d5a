"""Keys of `[inference]` and `[teacher]` that an engine cannot use are refused before anything starts."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from retrain.engines import ENGINES
from retrain.engines.table import KEYS, teacher_problems, unsupported_keys
from retrain.kernel.config.load import TableEntry, load_config
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import EngineTraits, PluginSpec
from retrain.kernel.hooks import hookimpl
from retrain.kernel.registry import Owner, Plugins

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


@pytest.mark.parametrize(
    ("flags", "key"),
    [
        ("--teacher-engine vllm --inference-engine vllm", "teacher-engine"),
        ("--teacher-engine vllm --inference-engine openai --inference-url http://LOCALHOST:8000/v1/", "teacher-engine"),
        ("--teacher-engine vllm --inference-engine max --inference-url http://0.0.0.0:8000", "teacher-engine"),
        ("--teacher-engine sglang --teacher-url http://[::1]:8000 --inference-engine vllm", "teacher-url"),
        (
            "--teacher-engine vllm --teacher-url https://u:secret@a/v1,http://b:7 --inference-engine sglang"
            " --inference-url https://c --inference-admin-url https://A:443",
            "teacher-url",
        ),
    ],
)
def test_the_same_server_is_refused(flags: str, key: str, tables: Mapping[str, TableEntry]) -> None:
    config, problems = load_config(None, tables=tables, arguments=flags.split())
    assert problems == []
    (problem,) = teacher_problems(config)
    assert f"--{key}" in problem.where
    assert "is the one that samples" in problem.what
    assert "secret" not in problem.what


@pytest.mark.parametrize(
    "flags",
    [
        "--inference-engine vllm",
        "--teacher-engine vllm",
        "--teacher-model builtin:tiny --inference-engine vllm",
        "--teacher-engine sglang --inference-engine vllm",
        "--teacher-engine vllm --teacher-url http://127.0.0.1:8001 --inference-engine vllm",
        "--teacher-engine vllm --teacher-url http://a/one --inference-engine vllm --inference-url http://a/two",
    ],
)
def test_another_server_is_not(flags: str, tables: Mapping[str, TableEntry]) -> None:
    config, _ = load_config(None, tables=tables, arguments=flags.split())
    assert teacher_problems(config) == []


@pytest.mark.parametrize("url", ["", "http://a", "https://a:1/base, http://user:pass@b:2", "http://a,http://b,"])
def test_urls_that_can_be_meant(url: str) -> None:
    assert InferenceTable(url=url).url == url


@pytest.mark.parametrize(
    "url",
    [
        *("a", "localhost:8000", "ftp://user:planted-login@a", "http://", "http://a b", "http://a?x=1"),
        *("http:/a", "http://a:99999", "http://[a"),
    ],
)
def test_urls_that_cannot_be_meant_are_refused_without_their_login(url: str) -> None:
    with pytest.raises(ValueError, match="is not a URL such as") as caught:
        InferenceTable(url=url)
    assert "planted-login" not in str(caught.value).split("input_value")[0]
