"""What the engine `pytorch` cannot do is refused when the configuration is read, with the reason."""

from __future__ import annotations

import pytest

from retrain.api import load_plugins
from retrain.kernel.config import schema
from retrain.kernel.config.resolved import Config
from retrain.rooms.inference.table import InferenceTable
from retrain.rooms.inference.unsupported_keys import KEYS
from retrain.rooms.session.assemble import check
from retrain.rooms.session.check import registered_tables
from retrain_local.checks import GPU_ONLY, problems_of


def configured(devices: str, **inference: str) -> Config:
    tables = {
        "backend": schema.BackendTable(backend="local", devices=devices),
        "inference": InferenceTable.model_validate(inference),
    }
    return Config(tables=tables)


@pytest.mark.parametrize(("name", "value"), sorted(GPU_ONLY))
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_what_only_a_gpu_can_is_refused_on_a_cpu_alone(devices: str, name: str, value: str) -> None:
    (problem,) = problems_of(configured(devices, **{name: value}))
    assert problem.where == f"[inference] {name} (default)"
    assert repr(value) in problem.what
    assert problem.why == GPU_ONLY[name, value]
    assert 'devices = "gpu:0"' in problem.fix
    for wanted in ("gpu:0", "gpu:0,gpu:1", "gpu:0,cpu"):  # the first device samples
        assert problems_of(configured(wanted, **{name: value})) == []


@pytest.mark.parametrize("devices", ["cpu", "gpu:0"])
def test_four_bits_are_refused_everywhere(devices: str) -> None:
    (problem,) = problems_of(configured(devices, dtype="fp4"))
    assert problem.what == "dtype = 'fp4' is refused"
    assert "4-bit" in problem.why


@pytest.mark.parametrize("choice", [{"dtype": "bf16"}, *({"kv_cache_dtype": name} for name in ("bf16", "int8", "fp8"))])
def test_a_cpu_has_the_rest(choice: dict[str, str]) -> None:
    assert problems_of(configured("cpu", **choice)) == []


def test_another_engine_is_not_this_ones_business() -> None:
    assert problems_of(configured("cpu", engine="vllm", dtype="fp4")) == []


def test_the_loader_asks_and_the_engine_heeds_every_key() -> None:
    plugins = load_plugins({})
    tables = registered_tables(plugins)
    _, problems = check(configured("cpu", dtype="fp4"), plugins, tables)
    assert "[inference] dtype (default)" in [problem.where for problem in problems]
    values = {"attention_kernel": "flash", "dtype": "bf16", "kv_cache_dtype": "int8"}
    assert {"logprobs", *values} == set(KEYS)
    _, problems = check(configured("gpu:0", **values), plugins, tables)
    assert [problem for problem in problems if problem.where.startswith("[inference]")] == []
