"""Engine `mlx` against the real server of MLX-LM on a CPU: under the local backend, and through the whole command."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer

from retrain.api import BackendError, LogprobRow, PluginContext, SampleRequest, SamplingParams, Seeds, load_plugins
from retrain.engines.engine import ServerEngine
from retrain.engines.mlx import convert
from retrain.engines.policy_check import probe_prompts
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.plugin import BUILTIN_MODELS
from tests.end_to_end.running import records, retrain
from tests.kit import engine_record
from tests.kit.mlx_server import mlx_serving, start

pytestmark = pytest.mark.long  # starting the server takes as long as ten other tests

TINY = BUILTIN_MODELS["tiny"]
EXACT = 1e-4  # nats, both sides in float32


@pytest.fixture
def make_backend(exact_model: Path, mlx_url: str) -> Iterator[Callable[..., tuple[LocalBackend, ServerEngine]]]:
    """A local backend with the engine `mlx`, and that engine."""
    opened = []

    def make(url: str = mlx_url) -> tuple[LocalBackend, ServerEngine]:
        tables = {
            "model": schema.ModelTable(model=str(exact_model), lora_rank=4),
            "inference": InferenceTable(engine="mlx", url=url, retry_s=20.0),
            "training": schema.TrainingTable(temperature=1.0),
        }
        tokenizer = AutoTokenizer.from_pretrained(exact_model)
        config = Config(tables=tables)
        context = PluginContext(config=config, seeds=Seeds(1), plugins=load_plugins(), tokenizer=tokenizer)
        opened.append(create_backend(context))
        return opened[-1], opened[-1]._engine

    yield make
    for backend in opened:
        backend.close()


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


def test_every_version_samples_from_its_own_weights_and_keys(make_backend) -> None:
    backend, engine = make_backend()
    prompts = probe_prompts(engine._context.tokenizer, 1024)
    for seed in (1, 2, 3):
        perturb(backend, seed)
        assert gap_of(backend, prompts) < EXACT  # the same prompts each time, so old keys and values would be found


def test_a_server_that_is_started_again_reads_the_adapter_by_itself(make_backend, exact_model, tmp_path) -> None:
    process, url = start(exact_model, tmp_path)
    try:
        backend, engine = make_backend(url)
        perturb(backend, 7)
        process.kill()
        process.wait()
        process, _ = start(exact_model, tmp_path, port=int(url.rpartition(":")[2]))
        assert gap_of(backend, probe_prompts(engine._context.tokenizer, 1024)) < EXACT
    finally:
        process.kill()
        process.wait()


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


def test_an_adapter_that_the_server_cannot_read_is_one_clear_error(make_backend, monkeypatch) -> None:
    backend, _ = make_backend()
    monkeypatch.setattr("retrain.engines.mlx.convert", lambda source, folder: None)
    with pytest.raises(BackendError) as caught:
        perturb(backend, 5)
    assert "The adapter path does not exist" in str(caught.value)
    assert "adapter_dir" in str(caught.value)


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
    asked = {"model": str(exact_model), "adapters": str(tmp_path / "mlx"), "prompt": prompt, "logprobs": True}
    answer = httpx.post(f"{mlx_url}/v1/completions", json=asked | {"max_tokens": 8}, timeout=60.0, trust_env=False)
    content = answer.json()["choices"][0]["logprobs"]["content"]
    tokens = [entry["id"] for entry in content]
    assert reference_logprobs(exact_model, folder, ids, tokens) == pytest.approx(
        [entry["logprob"] for entry in content], abs=EXACT
    )


def reference_logprobs(model: Path, adapter: Path, ids: list[int], tokens: list[int]) -> list[float]:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    peft = PeftModel.from_pretrained(base, str(adapter)).eval()
    with torch.no_grad():
        logits = peft(torch.tensor([ids + tokens])).logits[0].double().log_softmax(-1)
    return [float(logits[len(ids) - 1 + place, token]) for place, token in enumerate(tokens)]


BFLOAT16 = 0.05  # nats on average with the server in bfloat16
FEW = ("--batch-size", "2", "--group-size", "4", "--max-tokens", "8", "--eval-examples", "0", "--save-every", "0")
STEPS = ("--max-steps", "5", "--batch-size", "4", "--group-size", "8", "--eval-examples", "0", "--save-every", "0")
CURVES = ("loss", "mean_reward", "correct_rate", "grad_norm", "exec_surprisal_mean", "ratio_mean", "trained_tokens")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    shutil.copy(engine_record.__file__, tmp_path)
    return tmp_path


def test_five_steps_are_exact_and_their_curves_are_those_of_the_training_model(
    folder: Path, exact_model: Path, mlx_url: str
) -> None:
    through = ("--inference-engine", "engine_record.recording", "--inference-url", mlx_url, "--model", str(exact_model))
    environ = {"RECORDED_ENGINE": "retrain.engines.mlx.create_engine"}
    done = retrain(*through, *STEPS, "--log-dir", "logs/mlx", cwd=folder, environ=environ)
    assert done.code == 0, done.err
    lines = records(folder / "logs/mlx/metrics.jsonl")
    gaps = records(folder / "gaps.jsonl")
    assert [gap["version"] for gap in gaps] == list(range(1, len(gaps) + 1))  # one per step that trained
    assert all(0.0 < gap["gap"] < EXACT and gap["tokens"] > 64 for gap in gaps)
    assert len(lines) == len(records(folder / "samples.jsonl")) == 5
    trained = [line for line in lines if line["loss"] is not None]
    assert len(trained) == len(gaps) >= 3
    assert all(line["logprob_gap_max"] < EXACT for line in trained)
    replay = ("--inference-engine", "engine_record.replaying", "--model", str(exact_model), "--log-dir", "logs/again")
    again = retrain(*replay, *STEPS, cwd=folder)
    assert again.code == 0, again.err
    for ours, theirs in zip(records(folder / "logs/again/metrics.jsonl"), lines, strict=True):
        for name in CURVES:
            assert ours.get(name) == pytest.approx(theirs.get(name), rel=1e-3, abs=1e-5), name


def test_a_model_stored_in_bfloat16_is_as_near_as_that_allows(folder: Path, tmp_path: Path) -> None:
    with mlx_serving(TINY, tmp_path) as url:
        done = retrain("--inference-engine", "mlx", "--inference-url", url, *FEW, "--max-steps", "1", cwd=folder)
    assert done.code == 0, done.err
    told = re.search(r"(\S+) nats from the trainer's \(max (\S+)\)", " ".join((done.out + done.err).split()))
    assert told is not None, done.err
    assert 1e-3 < float(told[1]) < BFLOAT16


def test_below_temperature_one_its_numbers_are_refused_or_recomputed(
    folder: Path, exact_model: Path, mlx_url: str
) -> None:
    through = ("--inference-engine", "mlx", "--inference-url", mlx_url, "--model", str(exact_model), *FEW)
    refused = retrain(*through, "--temperature", "0.7", cwd=folder)
    assert refused.code == 2
    assert "mlx reports log-probabilities before temperature, and [training] temperature = 0.7" in refused.err
    assert 'logprobs = "trainer"' in refused.err
    assert "Traceback" not in refused.err
    keys = ("--temperature", "0.7", "--inference-logprobs", "trainer", "--max-steps", "2")
    done = retrain(*through, *keys, cwd=folder)
    assert done.code == 0, done.err
    for line in records(folder / "logs/tiny/metrics.jsonl"):
        assert 0.0 < line["engine_gap_max"] < EXACT
        assert line.get("logprob_gap_max", 0.0) < EXACT
