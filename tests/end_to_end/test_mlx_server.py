"""Engine `mlx` under the local backend, against the real server of MLX-LM on a CPU."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from retrain.api import (
    BackendError,
    ConfigError,
    LogprobRow,
    PluginContext,
    SampleRequest,
    SamplingParams,
    Seeds,
    load_plugins,
)
from retrain.engines.engine import ServerEngine
from retrain.engines.mlx import convert
from retrain.engines.policy_check import probe_prompts
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.plugin import BUILTIN_MODELS
from tests.kit.mlx_server import start

pytestmark = pytest.mark.slow  # starting the server takes as long as ten other tests

TINY = BUILTIN_MODELS["tiny"]
EXACT = 1e-4  # nats, both sides in float32


@pytest.fixture
def make_backend(exact_model: Path, mlx_url: str) -> Iterator[Callable[..., tuple[LocalBackend, ServerEngine]]]:
    """A local backend with the engine `mlx`, and that engine; `lr` is that of its optimizer."""
    opened = []

    def make(*, temperature: float = 1.0, url: str = mlx_url, **inference: Any) -> tuple[LocalBackend, ServerEngine]:
        tables = {
            "model": schema.ModelTable(model=str(exact_model), lora_rank=4),
            "inference": InferenceTable(engine="mlx", url=url, retry_s=20.0, **inference),
            "training": schema.TrainingTable(temperature=temperature),
        }
        tokenizer = AutoTokenizer.from_pretrained(exact_model)
        context = PluginContext(
            config=Config(tables=tables), seeds=Seeds(1), plugins=load_plugins(), tokenizer=tokenizer
        )
        backend = create_backend(context)
        opened.append(backend)
        return backend, backend._engine

    yield make
    for backend in opened:
        backend.close()


def complete(url: str, **body: Any) -> httpx.Response:
    return httpx.post(f"{url}/v1/completions", json={"max_tokens": 1} | body, timeout=60.0, trust_env=False)


def perturb(backend: LocalBackend, seed: int) -> None:
    """As if steps had been trained: every matrix of the adapter gets new random numbers."""
    import torch

    pair, _ = backend._open()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in pair.parameters.values():
            parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    backend._version += 1
    backend.publish()


def gap_of(backend: LocalBackend, prompts: list[np.ndarray], *, max_tokens: int = 24) -> float:
    requests = [SampleRequest(prompt_T=prompt_T, seeds_G=(1, 2)) for prompt_T in prompts]
    samples = backend.sample(requests, SamplingParams(max_tokens=max_tokens, temperature=1.0))
    pairs = [(request.prompt_T, one) for request, group in zip(requests, samples, strict=True) for one in group]
    rows = [LogprobRow.of(prompt_T, one.tokens_T) for prompt_T, one in pairs]
    ours = backend.logprobs(rows, 1.0)
    return max(
        float(np.abs(values_T[action_T] - one.logprobs_T).max())
        for values_T, (_, action_T), (_, one) in zip(ours, rows, pairs, strict=True)
    )


@pytest.mark.long
def test_every_version_samples_from_its_own_weights_and_keys(make_backend) -> None:
    backend, engine = make_backend()
    prompts = probe_prompts(engine._context.tokenizer, 1024)
    for seed in (1, 2, 3):
        perturb(backend, seed)
        assert gap_of(backend, prompts) < EXACT  # the same prompts each time, so old keys and values would be found


@pytest.mark.long
def test_a_server_that_is_started_again_reads_the_adapter_by_itself(make_backend, exact_model, tmp_path) -> None:
    process, url = start(exact_model, tmp_path)
    try:
        backend, engine = make_backend(url=url)
        perturb(backend, 7)
        process.kill()
        process.wait()
        process, _ = start(exact_model, tmp_path, port=int(url.rpartition(":")[2]))
        assert gap_of(backend, probe_prompts(engine._context.tokenizer, 1024)) < EXACT
    finally:
        process.kill()
        process.wait()


@pytest.mark.long
def test_prefix_caching_cannot_be_turned_off_from_here(make_backend) -> None:
    with pytest.raises(ConfigError, match="prefix_caching"):
        make_backend(prefix_caching=False)


@pytest.mark.long
def test_a_path_that_is_written_again_is_stale_in_weights_then_in_keys(
    make_backend, exact_model, mlx_url, tmp_path
) -> None:
    """What the server does, and why each version has a path of its own."""
    backend, engine = make_backend()
    for seed in (1, 2):
        perturb(backend, seed)
        (tmp_path / f"peft-{seed}").mkdir()
        backend.save_adapter(tmp_path / f"peft-{seed}")
    prompt = engine._context.tokenizer.decode(probe_prompts(engine._context.tokenizer, 1024)[-1])

    def likeliest(path: Path | None) -> float:
        asked = {"model": str(exact_model), "prompt": prompt, "logprobs": True, "top_logprobs": 1}
        answer = complete(mlx_url, **asked, adapters=None if path is None else str(path)).json()
        return float(answer["choices"][0]["logprobs"]["content"][0]["logprob"])

    reused, fresh = tmp_path / "reused", tmp_path / "fresh"
    convert(tmp_path / "peft-1", reused)
    old = likeliest(reused)
    shutil.rmtree(reused)
    convert(tmp_path / "peft-2", reused)
    assert likeliest(reused) == pytest.approx(old, abs=1e-5)  # the old weights still
    convert(tmp_path / "peft-2", fresh)
    right = likeliest(fresh)
    assert abs(likeliest(reused) - right) > 1e-3  # the new weights, with keys and values of the old ones


@pytest.mark.long
def test_default_model_ignores_adapters_and_so_is_never_asked_for(make_backend, exact_model, mlx_url, tmp_path) -> None:
    backend, engine = make_backend()
    perturb(backend, 4)
    adapter = str(engine._caller.dialect._adapters[engine._adapters.current.key])
    asked = {"prompt": "1 + 2 =", "logprobs": True, "top_logprobs": 5, "temperature": 1.0, "adapters": adapter}

    def tops(model: str, **changes: Any) -> dict[int, float]:
        answer = complete(mlx_url, **asked | {"model": model} | changes).json()
        return {top["id"]: top["logprob"] for top in answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]}

    assert tops("default_model") == tops(str(exact_model), adapters=None)
    assert tops(str(exact_model)) != tops(str(exact_model), adapters=None)
    (server,) = engine._caller.servers
    body = engine._caller.completion(np.asarray([5, 6]), seed=1, max_tokens=2, temperature=1.0, server=server).body
    assert body is not None
    assert body["model"] == str(exact_model)


@pytest.mark.long
def test_completions_follow_the_models_distribution_whatever_the_servers_defaults(make_backend) -> None:
    """Batched requests without a seed are independent draws: the first tokens have the frequencies they should."""
    backend, engine = make_backend()
    prompt_T = np.asarray(engine._context.tokenizer("Q", add_special_tokens=False)["input_ids"])
    (group,) = backend.sample(
        [SampleRequest(prompt_T=prompt_T, seeds_G=tuple(range(400)))], SamplingParams(max_tokens=1, temperature=1.0)
    )
    tokens_N = np.asarray([one.tokens_T[0] for one in group])
    expected = {int(one.tokens_T[0]): float(np.exp(one.logprobs_T[0])) for one in group}
    assert len(expected) > 5
    for token, probability in expected.items():
        deviation = np.sqrt(probability * (1 - probability) / len(group))
        assert abs(float((tokens_N == token).mean()) - probability) < 5 * deviation + 0.01


def test_prompts_that_no_text_stands_for_are_refused(make_backend) -> None:
    backend, engine = make_backend()
    tokenizer = engine._context.tokenizer
    byte = next(token for token in range(len(tokenizer)) if "\ufffd" in tokenizer.decode([token]))
    for prompt_T in (np.asarray([5, byte]), np.asarray([*tokenizer("1")["input_ids"], byte, 7])):
        with pytest.raises(BackendError, match="encodes to other tokens"):
            backend.sample(
                [SampleRequest(prompt_T=prompt_T, seeds_G=(1,))], SamplingParams(max_tokens=2, temperature=1.0)
            )


@pytest.mark.long
def test_an_adapter_that_the_server_cannot_read_is_one_clear_error(make_backend, monkeypatch) -> None:
    backend, engine = make_backend()
    dialect = engine._caller.dialect
    monkeypatch.setattr("retrain.engines.mlx.convert", lambda source, folder: None)
    with pytest.raises(BackendError) as caught:
        perturb(backend, 5)
    assert "The adapter path does not exist" in str(caught.value)
    assert "adapter_dir" in str(caught.value)
    assert dialect.name == "mlx"


def test_a_converted_adapter_computes_what_the_peft_one_does_at_every_scale(
    make_backend, exact_model, mlx_url, tmp_path
):
    """Trained matrices from outside, and alpha unlike the rank: scale, transposition and names are all seen."""
    backend, engine = make_backend()
    perturb(backend, 6)
    folder = tmp_path / "peft"
    folder.mkdir()
    backend.save_adapter(folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in tensors)
    save_file({name: 2.0 * tensor for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    prompt = "12 + 30 ="
    ids = engine._context.tokenizer(prompt)["input_ids"]
    config = (folder / "adapter_config.json").read_text()
    (folder / "adapter_config.json").write_text(config.replace('"lora_alpha": ', '"lora_alpha": 1'))
    convert(folder, tmp_path / "mlx")
    answer = complete(
        mlx_url, model=str(exact_model), adapters=str(tmp_path / "mlx"), prompt=prompt, logprobs=True, max_tokens=8
    ).json()
    content = answer["choices"][0]["logprobs"]["content"]
    tokens = [entry["id"] for entry in content]
    assert reference_logprobs(exact_model, folder, ids, tokens) == pytest.approx(
        [entry["logprob"] for entry in content], abs=EXACT
    )


def reference_logprobs(model: Path, adapter: Path, ids: list[int], tokens: list[int]) -> list[float]:
    """By transformers and PEFT."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        logits = peft(torch.tensor([ids + tokens])).logits[0].double().log_softmax(-1)
    return [float(logits[len(ids) - 1 + place, token]) for place, token in enumerate(tokens)]
