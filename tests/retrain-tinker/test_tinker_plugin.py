from __future__ import annotations

import inspect
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tinker
from tinker import types

from retrain.api import CheckpointMode, Config, Determinism, Kind, load_plugins
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable, TeacherTable
from retrain_tinker.adapter import fetch_adapter
from retrain_tinker.backend import TinkerBackend
from retrain_tinker.losses import Datum
from retrain_tinker.plugin import CAPABILITIES, retrain_check_config
from retrain_tinker.service import inputs_of, resolved
from tests.kit.tinker_rows import batch_of, drawn
from tests.kit.tinker_toy import Toy

Make = Callable[..., TinkerBackend]
HOSTED = {"backend": schema.BackendTable(backend="tinker"), "lora": schema.LoraTable()}


def test_the_backend_is_registered_with_what_it_can_do() -> None:
    (entry,) = load_plugins().find(Kind.BACKEND, "tinker")
    assert (entry.spec.traits, entry.owner.distribution) == (CAPABILITIES, "retrain-tinker")
    assert CAPABILITIES.checkpoint_resume_mode is CheckpointMode.EXACT
    assert CAPABILITIES.determinism is Determinism.NONE
    assert not CAPABILITIES.provides_entropy


def test_registering_imports_nothing_heavy() -> None:
    code = (
        "import sys, retrain_tinker.plugin; from retrain.api import load_plugins; load_plugins(); "
        "sys.exit(str(sorted({'tinker', 'torch', 'transformers', 'httpx'} & set(sys.modules)) or ''))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert result.stderr.strip() == ""


@pytest.mark.parametrize(
    ("backend", "keys", "refused"),
    [
        ("tinker", {}, []),
        ("tinker", {"engine": "vllm", "url": "http://127.0.0.1:1"}, ["engine", "url"]),
        ("local", {"engine": "vllm"}, []),
    ],
)
def test_sampling_keys_that_the_service_does_not_read_are_refused(
    backend: str, keys: dict[str, str], refused: list[str]
) -> None:
    tables = HOSTED | {"backend": schema.BackendTable(backend=backend), "inference": InferenceTable(**keys)}
    found = [(p.code, p.where) for p in retrain_check_config(Config(tables=tables))]
    assert found == [("tinker.key-without-effect", f"[inference] {key} (default)") for key in refused]


@pytest.mark.parametrize("teacher", [{"model": "other"}, {"adapter": "logs/a"}, {"engine": "vllm"}, {}], ids=str)
def test_a_teacher_is_compared_at_the_temperature_that_the_service_knows(teacher: dict[str, str]) -> None:
    found = []
    for temperature in (0.7, 1.0):
        training = schema.TrainingTable(temperature=temperature)
        tables = HOSTED | {"teacher": TeacherTable(**teacher), "training": training}
        found += [(temperature, problem.code) for problem in retrain_check_config(Config(tables=tables))]
    assert found == ([(0.7, "tinker.teacher-temperature")] if teacher else [])


def trained(made: TinkerBackend, folder: Path) -> dict[str, str]:
    """The state that a trained policy's checkpoint refers to."""
    made.train(batch_of(*drawn(made)))
    made.publish()
    made.save(folder)
    return json.loads((folder / "tinker_state.json").read_text())


def test_an_adapter_on_the_service_is_fetched_once(
    backend: Make, toy: Toy, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    config = Config(tables={"model": schema.ModelTable(model="toy/bigram", base_url=url)})
    assert fetch_adapter("some/folder", config) is None
    state = trained(backend(), tmp_path)
    for kind in ("adapter_path", "state_path"):
        folder = fetch_adapter(state[kind], config)
        assert folder is not None
        found = (folder / "adapter_model.safetensors").read_bytes()
        assert found == (tmp_path / "adapter_model.safetensors").read_bytes()
        assert json.loads((folder / "adapter_config.json").read_text())["target_modules"] == ["q_proj", "v_proj"]
        calls = len(toy.calls)
        assert fetch_adapter(state[kind], config) == folder
        assert len(toy.calls) == calls
    assert len(list((tmp_path / "cache" / "retrain" / "tinker").iterdir())) == 2
    assert len(toy.adapters) == 1


@pytest.mark.long
def test_squeeze_takes_a_tinker_path(backend: Make, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = trained(backend(), tmp_path)["adapter_path"]
    monkeypatch.setenv("TINKER_BASE_URL", url)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    command = [sys.executable, "-m", "retrain", "squeeze", path, "--json"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    modules = [layer["module"].rpartition(".")[2] for layer in json.loads(result.stdout)["layers"]]
    assert modules == ["q_proj", "v_proj"]


# ---------------------------------------------------------------- the SDK: releases 0.16.1 and 0.38 both pass


def test_every_call_that_is_made_exists() -> None:
    service, trainer, sampler = tinker.ServiceClient, tinker.TrainingClient, tinker.SamplingClient
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (service, (), {"base_url": None}),
        (service.create_lora_training_client, ("model",), {"rank": 1, "seed": 1, "train_unembed": False}),
        (service.create_training_client_from_state_with_optimizer, ("tinker://a/weights/b",), {}),
        (service.create_sampling_client, (), {"base_model": ""}),
        (trainer.forward, ([], "ppo", {"clip_low_threshold": 0.8}), {}),
        (trainer.forward_backward, ([], "ppo", None), {}),
        (trainer.optim_step, (types.AdamParams(),), {}),
        (trainer.save_state, ("name",), {"ttl_seconds": None}),
        (trainer.save_weights_and_get_sampling_client, (), {}),
        (sampler.sample, (None, 1, types.SamplingParams(max_tokens=1)), {}),
        (sampler.compute_logprobs, (types.ModelInput.from_ints([1]),), {}),
    ]
    if exports := hasattr(trainer, "save_weights_external") and hasattr(tinker, "RestClient"):
        calls += [
            (tinker.RestClient.get_external_weights_urls, ("path",), {}),
            (tinker.RestClient, (), {"base_url": None}),
        ]
    for function, arguments, named in calls:
        bound = () if inspect.isclass(function) else (object(),)
        inspect.signature(function).bind(*bound, *arguments, **named)
    assert exports or (hasattr(service, "create_rest_client") and hasattr(trainer, "save_weights_for_sampler"))
    assert hasattr(tinker, "RestClient") or hasattr(service, "get_server_capabilities")


def test_every_loss_and_number_of_adamw_is_known() -> None:
    numbers = {"learning_rate": 1.0, "beta1": 0.1, "beta2": 0.2, "eps": 0.3, "weight_decay": 0.4, "grad_clip_norm": 0.5}
    params = types.AdamParams(**numbers)
    assert {name: getattr(params, name) for name in numbers} == numbers
    assert {"importance_sampling", "ppo", "cispo"} <= set(types.LossFnType.__args__)
    params = types.SamplingParams(max_tokens=3, seed=2**31 - 1, stop=[5, 6], temperature=0.7)
    assert (params.max_tokens, params.seed, list(params.stop), params.temperature) == (3, 2**31 - 1, [5, 6], 0.7)
    with pytest.raises(Exception, match="grad_clip"):
        types.AdamParams(grad_clip=1.0)


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        ("ppo", {"logprobs": [0.0, -0.5, -1.5], "advantages": [0.0, 1.25, -2.0]}),
        ("cross_entropy", {"weights": [0.0, 1.25, -2.0]}),  # which takes no other inputs
    ],
)
def test_datums_keep_their_numbers(loss: str, wanted: dict[str, list[float]]) -> None:
    datum = Datum(
        inputs_T=np.array([1, 2, 3]),
        targets_T=np.array([2, 3, 4]),
        action_T=np.array([False, True, True]),
        logprobs_T=np.array([0.0, -0.5, -1.5]),
        advantages_T=np.array([0.0, 1.25, -2.0]),
    )
    (made,) = inputs_of([datum], loss)
    assert made.model_input.to_ints() == [1, 2, 3]
    found = {name: tensor.to_numpy().tolist() for name, tensor in made.loss_fn_inputs.items()}
    assert found == {"target_tokens": [2, 3, 4]} | wanted
    assert {tensor.dtype for tensor in made.loss_fn_inputs.values()} == {"int64", "float32"}
    assert resolved(tinker) is tinker
    coming = SimpleNamespace(result=lambda: "client")
    assert resolved(coming) == "client", "results of either kind of call"
