"""A real vLLM samples the trained policy with the right numbers. `nox -s server-vllm` installs it and runs this."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from peft import PeftModel
from transformers import AutoTokenizer

from retrain.api import (
    BackendError,
    ConfigError,
    LogprobRow,
    ModelExport,
    PluginContext,
    SampleRequest,
    SamplingParams,
    Seeds,
    TrainBatch,
    load_plugins,
)
from retrain.engines.given_tokens import open_server
from retrain.engines.policy_check import PROBE_TOKENS
from retrain.engines.vllm import VLLM
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable, TeacherTable
from retrain.kernel.config.resolved import Config
from retrain_local.backend import LocalBackend
from retrain_local.export.write import export_model
from retrain_local.factory import create_backend
from retrain_local.plugin import BUILTIN_MODELS
from retrain_local.teacher import open_teacher
from tests.end_to_end.running import records, retrain
from tests.kit import engine_record
from tests.kit.causal_types import COMPOSITES, small_composite, small_model
from tests.kit.local_backend import REQUESTS, Local, saved
from tests.kit.plain_path import own_logprobs
from tests.kit.sampled_rows import sampled_rows
from tests.servers.fleet import python, vllm_serving

pytestmark = [
    pytest.mark.server,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(not python(), reason="RETRAIN_VLLM_PYTHON names no Python with vLLM; `nox -s server-vllm` does"),
]
TINY = BUILTIN_MODELS["tiny"]
EXACT = 1e-4
PROBE = SamplingParams(max_tokens=PROBE_TOKENS, temperature=0.7)
SMALL = ("--batch-size", "4", "--group-size", "8", "--eval-examples", "0", "--save-every", "0", "--seed", "5")


@pytest.fixture(scope="module")
def processed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server that gives log-probabilities after temperature."""
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    with vllm_serving(TINY, log, "--logprobs-mode", "processed_logprobs") as url:
        yield url


@pytest.fixture
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(TINY)


def context_for(tokenizer: Any, url: str = "", *, temperature: float = 0.7, **changes: Any) -> PluginContext:
    """A context with keys of `[inference]`, or with whole tables."""
    tables = {
        "model": schema.ModelTable(model="builtin:tiny", lora_rank=8),
        "backend": schema.BackendTable(devices="cpu"),
        "training": schema.TrainingTable(temperature=temperature, lr=5e-3),
        "teacher": changes.pop("teacher", TeacherTable()),
        "inference": InferenceTable(engine="vllm", url=url, retry_s=60.0, **changes),
    }
    return PluginContext(config=Config(tables=tables), seeds=Seeds(1), plugins=load_plugins(), tokenizer=tokenizer)


@pytest.fixture
def backend(processed: str, tokenizer: Any) -> Iterator[LocalBackend]:
    built = create_backend(context_for(tokenizer, processed))
    yield built
    built.close()


def train_a_step(backend: LocalBackend, step: int) -> None:
    """A real gradient on what the server drew, with advantages that mean nothing."""
    stream = np.random.default_rng(step)
    request = SampleRequest(prompt_T=stream.integers(3, 500, size=20), seeds_G=tuple(range(4)))
    groups = backend.sample([request], SamplingParams(max_tokens=24, temperature=0.7))
    rows = sampled_rows([request], groups, stream)
    report = backend.train(TrainBatch(step=step, rows=rows, temperature=0.7))
    assert report.gap_max < EXACT
    backend.publish()


def test_five_steps_of_the_whole_command_and_their_curves_with_the_training_model(
    processed: str, tmp_path: Path
) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    shutil.copy(engine_record.__file__, tmp_path)
    environ = {"RECORDED_ENGINE": "retrain.engines.vllm.create_engine"}
    url = ("--inference-url", processed, *SMALL, "--max-steps", "5", "--temperature", "0.7")
    curves = []
    for engine in ("recording", "replaying"):
        run = (*url, "--inference-engine", f"engine_record.{engine}", "--log-dir", f"logs/{engine}")
        done = retrain(*run, cwd=tmp_path, environ=environ)
        assert done.code == 0, done.err
        curves.append(records(tmp_path / f"logs/{engine}/metrics.jsonl"))
    assert len(curves[0]) == 5
    gaps = records(tmp_path / "gaps.jsonl")  # on eight prompts of up to 420 tokens, after each step that trained
    assert gaps
    assert max(gap["gap"] for gap in gaps) < EXACT
    assert {line["condition"] for line in curves[0]} == {"maxrl+gtpo_sepa"}
    assert any(line["loss"] is not None for line in curves[0])
    for ours, theirs in zip(*curves, strict=True):
        assert ours["probe_gap_max"] < EXACT
        assert ours.get("logprob_gap_max", 0.0) < EXACT
        for name in ("loss", "grad_norm", "correct_rate", "mean_tokens", "exec_surprisal_mean", "sepa_lambda"):
            assert theirs.get(name) == pytest.approx(ours.get(name), abs=EXACT, rel=1e-3), name


def test_a_stale_prefix_cache_is_what_in_place_would_give_and_the_probe_sees_it(
    backend: LocalBackend, processed: str
) -> None:
    train_a_step(backend, 0)
    adapters = backend._engine._adapters  # type: ignore[attr-defined]
    comparison, (server,) = adapters.comparison, adapters.comparison.caller.servers
    comparison.require_trainers(server, adapters.current)
    fixed = adapters.current
    with adapters.using():  # so that it stays loaded
        for step in range(1, 4):
            train_a_step(backend, step)
        shutil.copytree(adapters.current.folder, fixed.folder, dirs_exist_ok=True)
        body = {"lora_name": fixed.key, "lora_path": str(fixed.folder)}
        refused = httpx.post(f"{processed}/v1/load_lora_adapter", json=body, timeout=60.0)
        if refused.status_code == 400:  # the same name twice: refused, and the old weights go on serving
            with pytest.raises(BackendError, match="does not sample from policy version"):
                comparison.require_trainers(server, fixed)
        in_place = httpx.post(f"{processed}/v1/load_lora_adapter", json={**body, "load_inplace": True}, timeout=60.0)
        assert in_place.status_code == 200
        short, long = comparison.probes
        gaps = [comparison.with_trainer([server], fixed, [each])[server] for each in (short, long)]
        assert gaps[0].max < EXACT
        assert gaps[1].max > 100 * EXACT
        with pytest.raises(BackendError, match="does not sample from policy version"):
            comparison.require_trainers(server, fixed)


def test_what_the_server_refuses(processed: str) -> None:
    base = {"model": str(TINY), "prompt": [5, 6, 7], "max_tokens": 2}
    unknown = httpx.post(f"{processed}/v1/completions", json={**base, "model": "nobody"}, timeout=60.0)
    assert unknown.status_code == 404
    outside = httpx.post(f"{processed}/v1/completions", json={**base, "prompt": [512]}, timeout=60.0)
    assert outside.status_code == 400
    missing = {"lora_name": "x", "lora_path": "/nowhere"}
    assert httpx.post(f"{processed}/v1/load_lora_adapter", json=missing, timeout=60.0).status_code == 404


def test_log_probabilities_before_temperature(tmp_path: Path, tokenizer: Any) -> None:
    with vllm_serving(TINY, tmp_path / "server.log") as url:
        with pytest.raises(ConfigError, match="--logprobs-mode processed_logprobs"):
            create_backend(context_for(tokenizer, url))
        for options in ({"temperature": 1.0}, {"temperature": 0.7, "logprobs": "trainer"}):
            backend = create_backend(context_for(tokenizer, url, **options))
            request = SampleRequest(prompt_T=np.arange(5, 30), seeds_G=(1, 2))
            temperature = float(options["temperature"])  # type: ignore[arg-type]
            (group,) = backend.sample([request], SamplingParams(max_tokens=16, temperature=temperature))
            rows = [LogprobRow.of(np.asarray(request.prompt_T), sample.tokens_T) for sample in group]
            for ours_T, (_, action_T), sample in zip(backend.logprobs(rows, temperature), rows, group, strict=True):
                np.testing.assert_allclose(ours_T[action_T], sample.logprobs_T, atol=EXACT)
            print(json.dumps(dict(backend.metrics())))
            backend.close()


def test_a_teacher_on_the_server_gives_what_a_local_one_gives(tokenizer: Any, tmp_path: Path) -> None:
    stream = np.random.default_rng(0)
    rows = [LogprobRow.of(stream.integers(3, 500, size=20), stream.integers(3, 500, size=n)) for n in (1, 7, 200)]
    wanted = open_teacher(context_for(tokenizer, teacher=TeacherTable(model="builtin:tiny"))).logprobs(rows, 1.0)
    # with --enable-lora, vLLM 0.32 ends on a CPU when it is asked for log-probabilities of the prompt
    with vllm_serving(TINY, tmp_path / "server.log", takes_adapters=False) as url:
        found = given_by(url, tokenizer, rows)
    gap = max(float(np.abs(a - b).max()) for a, b in zip(found, wanted, strict=True))
    print(f"log p of given tokens: largest difference {gap:.1e}")
    assert gap < EXACT
    assert all(values_T.min() < -1.0 for values_T in wanted)


def given_by(url: str, tokenizer: Any, rows: list[LogprobRow]) -> list[Any]:
    """What a server says of the rows."""
    teacher = open_server(VLLM(), context_for(tokenizer, teacher=TeacherTable(engine="vllm", url=url)))
    found = teacher.logprobs(rows, 1.0)
    teacher.close()
    return found


# On a CPU, vLLM 0.32 rotates only the first of LFM2's heads unless it uses the plain operation.
PLAIN_ROPE = ("--compilation-config", '{"custom_ops": ["-rotary_embedding"]}')
# Published configurations of LFM2 have conv_dim and block_dim, which vLLM reads and transformers no longer writes.
LFM2 = {"conv_dim": 128, "block_dim": 128}
# On a CPU, vLLM 0.32 computes the gated delta rule in bf16 only, and not with heads of 32.
DELTA = {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
BF16 = ("--dtype", "bfloat16")
TEXT = ("--language-model-only",)  # without the vision tower of the checkpoint
HEADS = {"head_dim": 32}
GRANITE = {"num_local_experts": 0, "num_experts_per_tok": 0, "mamba_d_head": 64, "mamba_d_state": 16}
EXPERTS = {"num_local_experts": 4}
MIXTURES = ("qwen3_moe",)  # with --enable-lora, vLLM 0.32 computes any experts by Triton, which has no CPU
# Of a mean over the sampled tokens. In fp32 it is 1e-6. In bf16 transformers' own is 0.04 away from fp32.
FP32_GAP, BF16_GAP = 1e-5, 0.1
# Sizes of the model, options of the server, and the tolerance.
SERVED: dict[str, tuple[dict[str, Any], tuple[str, ...], float]] = {
    "lfm2": (LFM2, PLAIN_ROPE, FP32_GAP),
    "qwen3_5": (HEADS | DELTA, (*BF16, *TEXT), BF16_GAP),
    "gemma3": (HEADS, TEXT, FP32_GAP),
    "gemma3_text": (HEADS, (), FP32_GAP),
    "falcon_h1": (HEADS, (), FP32_GAP),
    "granitemoehybrid": (GRANITE, (), FP32_GAP),
    "qwen3_moe": (HEADS | EXPERTS, (), FP32_GAP),
}


@pytest.mark.parametrize("kind", SERVED)
def test_a_model_is_served_with_its_adapter_and_merged(kind: str, tmp_path: Path) -> None:
    sizes, options, within = SERVED[kind]
    base, merged = tmp_path / "base", tmp_path / "merged"
    made = small_composite if kind in COMPOSITES else small_model
    model = made(kind, hidden_size=128, vocab_size=512, max_position_embeddings=1024, **sizes)
    model.save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TINY / name, base)
    local = Local(folder=base, requests=REQUESTS)
    adapter, context = saved(tmp_path / "adapter", local.trained(3, lr=3e-2).save_adapter), local.context()
    merged.mkdir()
    given = {"base": str(base), "adapter": adapter, "out": merged, "form": "folder", "dtype": "", "with_check": True}
    export_model(ModelExport(**given, config=context.config, plugins=context.plugins))
    plain = type(model).from_pretrained(base).eval()
    trained = PeftModel.from_pretrained(type(model).from_pretrained(base), str(adapter)).eval()
    # A prompt of one token ends vLLM's convolution in bf16 on a CPU.
    requests = REQUESTS[:2] if within == BF16_GAP else REQUESTS
    if kind not in MIXTURES:
        with vllm_serving(base, tmp_path / "base.log", *options, "--lora-modules", f"adapter={adapter}") as url:
            assert agrees(plain, sampled(url, str(base), requests), within)
            rows = sampled(url, "adapter", requests)
        assert agrees(trained, rows, within)
        assert gap(plain, rows)[0] > max(0.1, 5 * within)
    with vllm_serving(merged, tmp_path / "merged.log", *options, takes_adapters=False) as url:
        rows = sampled(url, str(merged), requests)
    assert agrees(trained, rows, within)
    assert gap(plain, rows)[0] > max(0.1, 5 * within)


def sampled(url: str, model: str, requests: Sequence[SampleRequest]) -> list[tuple[list[int], list[float]]]:
    """The ids of each prompt and its completion, and log-probabilities of the completion."""
    rows = []
    for request in requests:
        body = {"model": model, "prompt": request.prompt_T.tolist(), "max_tokens": 24, "temperature": 1.0}
        body |= {"top_k": -1, "top_p": 1.0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=600.0).raise_for_status().json()
        choice = answer["choices"][0]
        rows.append((choice["prompt_token_ids"] + choice["token_ids"], choice["logprobs"]["token_logprobs"]))
    return rows


def agrees(model: Any, rows: list[tuple[list[int], list[float]]], within: float) -> bool:
    mean, largest = gap(model, rows)
    return mean < within and (within > FP32_GAP or largest < EXACT)


def gap(model: Any, rows: list[tuple[list[int], list[float]]]) -> tuple[float, float]:
    """The mean and the largest distance of served log-probabilities from those of the model."""
    with torch.no_grad():
        found = [own_logprobs(model, torch.tensor(ids))[-len(logprobs) :] for ids, logprobs in rows]
    pairs = zip(found, rows, strict=True)
    distances = torch.cat([(own - torch.tensor(served)).abs() for own, (_, served) in pairs])
    print(f"log p of sampled tokens differ by {distances.mean():.1e}, by {distances.max():.1e} at most")
    return float(distances.mean()), float(distances.max())
