"""What the engine `pytorch` cannot do is refused when the configuration is read, with the reason."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from retrain.api import Problem, load_plugins
from retrain.engines.table import KEYS
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import EntropyTable, InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.run.check import check
from retrain.run.run_records import kept_checkpoints
from retrain.run.tables import registered_tables
from retrain_local.checks import GPU_ONLY, adapter_problems, full_problems, problems_of


def configured(devices: str, **inference: str) -> Config:
    tables = {
        "backend": schema.BackendTable(backend="local", devices=devices),
        "inference": InferenceTable.model_validate(inference),
    }
    return Config(tables=tables)


@pytest.mark.parametrize("kernel", sorted(GPU_ONLY))
@pytest.mark.parametrize("devices", ["cpu", "cpu,cpu"])
def test_what_only_a_gpu_can_is_refused_on_a_cpu_alone(devices: str, kernel: str) -> None:
    (problem,) = problems_of(configured(devices, attention_kernel=kernel))
    assert (problem.code, problem.where) == ("engine.kernel-needs-gpu", "[inference] attention_kernel (default)")
    for wanted in ("gpu:0", "gpu:0,gpu:1", "gpu:0,cpu"):  # the first device samples
        assert problems_of(configured(wanted, attention_kernel=kernel)) == []


def test_an_adapter_that_does_not_fit_is_refused_before_the_model_loads(tmp_path: Path) -> None:
    def resumed(*, anyway: bool = True, rank: int = 8, model: str = "builtin:tiny") -> list[Problem]:
        resume = schema.ResumeTable.model_validate({"from": str(tmp_path), "anyway": anyway})
        tables = {"resume": resume, "model": schema.ModelTable(lora_rank=rank, model=model)}
        return adapter_problems(Config(tables=tables), load_plugins())

    tiny = json.loads((Path(str(load_plugins().locate_model("builtin:tiny"))) / "config.json").read_text())
    layers, width = tiny["num_hidden_layers"], tiny["hidden_size"]
    assert resumed(rank=16) == []
    (tmp_path / "adapter" / "final").mkdir(parents=True)
    (tmp_path / "adapter" / "final" / "model.safetensors").touch()
    assert [problem.fix for problem in resumed()] == ["set it to 0, or start a new run"], "trained without an adapter"
    shutil.rmtree(tmp_path / "adapter")
    for name, text in (("checkpoint_step_1", "[]"), ("checkpoint_step_2", '{"r": 8}'), ("final", "{")):
        (tmp_path / "adapter" / name).mkdir(parents=True)
        (tmp_path / "adapter" / name / "adapter_config.json").write_text(text)
    tensors = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight": np.zeros((8, width), np.float32)
        for layer in range(layers)
    }
    save_file(tensors, tmp_path / "adapter/checkpoint_step_2/adapter_model.safetensors")
    assert resumed() == resumed(model="some/hub-id") == []
    assert resumed(anyway=False, rank=16) == []  # the resume itself names every differing key
    (problem,) = resumed(rank=16)
    assert (problem.code, problem.where) == ("resume.other-adapter", "[model] lora_rank (default)")
    (tmp_path / "other").mkdir()
    (tmp_path / "other/config.json").write_text(json.dumps({"num_hidden_layers": layers + 1, "hidden_size": width}))
    (problem,) = resumed(model=str(tmp_path / "other"))
    assert (problem.code, problem.where) == ("resume.other-adapter", "[model] model (default)")


def test_weights_of_few_bits_are_refused_on_every_device_and_a_cpu_has_the_rest() -> None:
    for devices, dtype in itertools.product(("cpu", "gpu:0"), ("fp4", "fp8")):
        assert [problem.code for problem in problems_of(configured(devices, dtype=dtype))] == ["engine.dtype-refused"]
    for choice in ({"dtype": "bf16"}, *({"kv_cache_dtype": name} for name in ("bf16", "int8", "fp8"))):
        assert problems_of(configured("cpu", **choice)) == []
    assert problems_of(configured("cpu", engine="vllm", dtype="fp4")) == [], "another engine has its own checks"


def test_the_loader_asks_and_the_engine_heeds_every_key() -> None:
    plugins = load_plugins({})
    tables = registered_tables(plugins)
    _, problems = check(configured("cpu", dtype="fp4"), plugins, tables)
    assert "[inference] dtype (default)" in [problem.where for problem in problems]
    values = {"attention_kernel": "flash", "dtype": "bf16", "kv_cache_dtype": "int8"}
    assert {"logprobs", *values} == set(KEYS)
    _, problems = check(configured("gpu:0", **values), plugins, tables)
    assert [problem for problem in problems if problem.where.startswith("[inference]")] == []


def whole(backend: str = "local", engine: str = "pytorch", **training: int) -> Config:
    tables = {
        "backend": schema.BackendTable(backend=backend, devices="cpu"),
        "inference": InferenceTable.model_validate({"engine": engine}),
        "model": schema.ModelTable(lora_rank=0),
        "lora": schema.LoraTable(alpha=4),
        "entropy": EntropyTable(coef=0.1),
        "training": schema.TrainingTable.model_validate(training),
    }
    others = {name: entry.model() for name, entry in registered_tables(load_plugins({})).items()}
    return Config(tables=others | tables)


def test_what_takes_an_adapter_is_refused_where_all_weights_are_trained() -> None:
    assert [kept_checkpoints(config) for config in (whole(), whole(keep_last=5), configured("cpu"))] == [2, 5, 0]
    found = {problem.where.removesuffix(" (default)"): problem.code for problem in full_problems(whole(engine="vllm"))}
    keys = dict.fromkeys(("[entropy] coef", "[lora] alpha"), "config.not-with-rank-0")
    assert found == keys | {"[inference] engine": "engine.needs-adapter"}


@pytest.mark.parametrize(
    ("backend", "what", "fix"),
    [
        ("tinker", "trains adapters only", 'set a rank, such as 32, or use backend = "local"'),
        ("prime_rl", "the trainer has its own configuration", "or no [model.lora] to train all weights"),
        ("local", "", ""),
    ],
)
def test_a_backend_that_trains_adapters_only_refuses_rank_0(backend: str, what: str, fix: str) -> None:
    plugins = load_plugins({})
    _, problems = check(whole(backend), plugins, registered_tables(plugins))
    refused = [problem for problem in problems if problem.where.startswith("[model] lora_rank")]
    assert len(refused) == bool(what)
    assert all(what in problem.what and problem.fix.endswith(fix) for problem in refused)
