"""Backend tinker against the real thing: SkyRL-tx with a copy of the built-in tiny model. `nox -s server-tinker`."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from retrain.api import (
    BackendError,
    Config,
    ConfigError,
    LogprobRow,
    PluginContext,
    SampleRequest,
    SamplingParams,
    Seeds,
    TrainBatch,
    TrainRow,
    load_plugins,
)
from retrain.run.tables import registered_tables
from retrain_local.plugin import BUILTIN_MODELS
from retrain_local.training.step_loss import NAMED, PolicyLoss
from retrain_tinker.backend import TinkerBackend, create_backend
from retrain_tinker.options import TinkerOptions
from tests.end_to_end.killing import finish, start
from tests.end_to_end.running import records
from tests.kit import server_process
from tests.kit.scored_tokens import scored
from tests.kit.tinker_rows import batch_of

pytestmark = [pytest.mark.server, pytest.mark.timeout(3000)]
TOLERANCE = 1e-4  # nats, float32 on both sides
RANK = 16


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SkyRL]:
    with tiny_server(tmp_path_factory.mktemp("skyrl")) as started:
        yield started


@pytest.fixture
def backend(server: SkyRL, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., TinkerBackend]]:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    made: list[TinkerBackend] = []

    def make(**changes: Any) -> TinkerBackend:
        given: dict[str, dict[str, Any]] = {
            "model": {"model": "builtin:tiny", "base_url": server.url, "lora_rank": RANK},
            "training": {"temperature": 1.0, "lr": 3e-3},
        }
        for path, value in changes.items():
            table, _, key = path.partition("__")
            given.setdefault(table, {})[key] = value
        plugins = load_plugins()
        models = registered_tables(plugins)
        context = PluginContext(
            config=Config(tables={name: models[name].model(**values) for name, values in given.items()}),
            seeds=Seeds(1),
            plugins=plugins,
            params=TinkerOptions(base_model=str(server.model), timeout_s=600, connect_timeout_s=300),
            tokenizer=AutoTokenizer.from_pretrained(server.model),
        )
        made.append(create_backend(context))
        return made[-1]

    yield make
    for each in made:
        each.close()


def prompt(text: str) -> np.ndarray:
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN_MODELS["tiny"])
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return np.array(tokenizer(chat, add_special_tokens=False)["input_ids"])


def rows_of(backend: TinkerBackend, count: int = 2, first_seed: int = 0) -> tuple[TrainRow, ...]:
    """Completions of different lengths, with credit that differs from token to token."""
    prompts = [prompt(f"What is {12 + i} + {30 - i}? Put your final answer in \\boxed{{}}.") for i in range(4)]
    requests = [SampleRequest(prompt_T=p, seeds_G=tuple(range(first_seed, first_seed + count))) for p in prompts]
    samples = backend.sample(requests, SamplingParams(max_tokens=32, temperature=1.0))
    return batch_of(requests, samples).rows


def adapter(backend: TinkerBackend, folder: Path) -> Path:
    folder.mkdir()
    backend.save_adapter(folder)
    return folder


def in_peft(folder: Path, *, trainable: bool = False) -> Any:
    base = AutoModelForCausalLM.from_pretrained(BUILTIN_MODELS["tiny"], dtype=torch.float32)
    return PeftModel.from_pretrained(base, folder, is_trainable=trainable).eval()


def logprobs(model: Any, tokens_T: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """Log-probabilities of tokens[1:]."""
    logits = model(torch.tensor(tokens_T)[None]).logits[0, :-1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens_T)[1:, None])[:, 0]


# ---------------------------------------------------------------- the numbers


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_downloaded_adapter_gives_the_services_logprobs(
    backend: Callable[..., TinkerBackend], tmp_path: Path, temperature: float
) -> None:
    """Sampler and trainer alike, on 8 prompts of which one has more than 400 tokens; raw, whatever the temperature."""
    made = backend(training__temperature=temperature, training__lr=1e-2)
    for step in range(2):
        made.train(TrainBatch(step=step, rows=rows_of(made, first_seed=step), temperature=temperature))
        made.publish()
    model = in_peft(adapter(made, tmp_path / "adapter"))
    prompts = [prompt(f"What is {7 * i} + {13 * i}?") for i in range(7)] + [np.tile(prompt("What is 2 + 3?"), 30)[:450]]
    requests = [SampleRequest(prompt_T=p, seeds_G=(5,)) for p in prompts]
    samples = made.sample(requests, SamplingParams(max_tokens=24, temperature=temperature))
    gaps, off = [], []
    rows = []
    for p, (sample,) in zip(prompts, samples, strict=True):
        tokens = np.concatenate([p, sample.tokens_T])
        rows.append(LogprobRow(tokens, np.arange(len(tokens)) >= len(p)))
        with torch.no_grad():
            raw = logprobs(model, tokens)[len(p) - 1 :].numpy()
            tempered = logprobs(model, tokens, temperature)[len(p) - 1 :].numpy()
        gaps.append(np.abs(raw - sample.logprobs_T).max())
        off.append(np.abs(tempered - sample.logprobs_T).max())
    assert max(gaps) < TOLERANCE
    assert (max(off) > 0.1) == (temperature != 1.0)
    for (tokens, action), found in zip(rows, made.logprobs(rows, temperature), strict=True):
        with torch.no_grad():
            wanted = logprobs(model, tokens).numpy()
        assert np.abs(found[1:] - wanted)[action[1:]].max() < TOLERANCE


@pytest.mark.parametrize("loss", ["", "likelihood"])
def test_an_optimizer_step_is_that_of_the_mean_over_action_tokens(
    backend: Callable[..., TinkerBackend], tmp_path: Path, loss: str
) -> None:
    """AdamW with a huge epsilon and no memory moves weights by the gradient, which is compared with our own loss.

    That of `[algorithm]`, and that of given answers, which `[sft]` trains on.
    """
    ours = NAMED[loss] if loss else PolicyLoss()
    step_size, epsilon = 0.5, 1e4
    keys = {"optimizer__beta1": 0.0, "optimizer__beta2": 0.0, "optimizer__eps": epsilon}
    made = backend(**keys, training__lr=step_size * epsilon)
    before = adapter(made, tmp_path / "0")
    for number in (1, 2):  # in the second step A has a gradient too
        rows = rows_of(made, count=3, first_seed=10 * number)
        model = in_peft(before, trainable=True)
        total = sum(int(row.action_T.sum()) for row in rows)
        for row in rows:
            at = row.action_T[1:]
            old, credit = (
                torch.tensor(values[1:][at], dtype=torch.float32) for values in (row.logprobs_T, row.advantages_T)
            )
            ours.of_pack(logprobs(model, row.tokens_T)[at], scored(old, credit), total)[0].backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.requires_grad:
                    parameter.sub_(step_size * parameter.grad)
        wanted = get_peft_model_state_dict(model)
        made.train(TrainBatch(step=number, rows=rows, temperature=1.0, loss=loss))
        made.publish()
        after = adapter(made, tmp_path / str(number))
        found, start = load_file(after / "adapter_model.safetensors"), load_file(before / "adapter_model.safetensors")
        moved = torch.cat([(wanted[name] - start[name]).flatten() for name in sorted(wanted)])
        missed = torch.cat([(wanted[name] - found[name]).flatten() for name in sorted(wanted)])
        print(f"{loss or 'policy loss'}, step {number}: relative distance {missed.norm() / moved.norm():.1e}")
        assert moved.abs().max() > 1e-3
        assert missed.norm() < 2e-3 * moved.norm()
        before = after


def test_the_reference_is_the_base_model(backend: Callable[..., TinkerBackend]) -> None:
    made = backend()
    batch = TrainBatch(step=0, rows=rows_of(made, count=3), temperature=1.0)
    rows = [LogprobRow(row.tokens_T, row.action_T) for row in batch.rows]
    before = made.reference_logprobs(rows, 1.0)
    made.train(batch)
    made.publish()
    base = AutoModelForCausalLM.from_pretrained(BUILTIN_MODELS["tiny"], dtype=torch.float32).eval()
    for (tokens, action), first, second, policy in zip(
        rows, before, made.reference_logprobs(rows, 1.0), made.logprobs(rows, 1.0), strict=True
    ):
        with torch.no_grad():
            wanted = logprobs(base, tokens).numpy()
        gap = np.abs(first[1:] - wanted)[action[1:]].max()
        print(f"{len(tokens)} tokens: {gap:.1e} nats at most")
        assert gap < TOLERANCE
        assert np.abs(second - first).max() < TOLERANCE
        assert np.abs(policy - first).max() > 100 * TOLERANCE  # the policy has moved
        assert not second[~action].any()


# ---------------------------------------------------------------- what it cannot do


@pytest.mark.parametrize(
    ("changes", "kind", "words"),
    [
        ({"model__lora_rank": 64}, BackendError, "no adapter of this rank"),
        ({"algorithm__loss": "cispo"}, ConfigError, "does not compute the loss 'cispo'"),
        ({"algorithm__loss": "ppo", "algorithm__clip_eps": 0.1}, ConfigError, "computes another loss"),
        ({"optimizer__grad_clip_norm": 1.0}, ConfigError, "cannot clip a gradient"),
    ],
    ids=str,
)
def test_what_it_lacks_is_refused_before_training(
    backend: Callable[..., TinkerBackend], changes: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        backend(**changes)


def test_ppo_with_its_own_bounds_is_taken(backend: Callable[..., TinkerBackend]) -> None:
    made = backend(algorithm__loss="ppo")
    assert made.train(TrainBatch(step=0, rows=rows_of(made), temperature=1.0)).clip_fraction == 0.0


# ---------------------------------------------------------------- the whole command


TRAINING = """
[model]
model = "builtin:tiny"
base_url = "{url}"
lora_rank = 16
[backend]
backend = "tinker"
[backend.options]
base_model = "{model}"
[sepa]
steps = 20
delay_steps = 3
[training]
seed = 1
max_steps = 24
batch_size = 4
group_size = 16
max_tokens = 48
temperature = 1.0
lr = 3e-3
save_every = 6
[data]
source = "arithmetic"
[eval]
every = 0
examples = 32
samples = 4
[logging]
log_dir = "run"
"""


def test_the_tiny_model_learns_although_the_run_is_killed_on_the_way(
    server: SkyRL, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_API_KEY", "tml-test")
    file = tmp_path / "run" / "metrics.jsonl"

    def metrics() -> list[dict[str, Any]]:
        return records(file) if file.exists() else []

    (tmp_path / "retrain.toml").write_text(TRAINING.format(url=server.url, model=server.model))
    process = start(cwd=tmp_path)
    while not (lines := metrics()) or lines[-1]["step"] < 8:
        assert process.poll() is None, finish(process)
        time.sleep(0.5)
    process.send_signal(signal.SIGKILL)
    process.wait()
    killed = {line["step"]: line for line in metrics()}
    resumed = start("--resume", "run", cwd=tmp_path)
    _, err = resumed.communicate()
    assert resumed.returncode == 0, err
    lines = metrics()
    assert [line["step"] for line in lines] == list(range(-1, 24))
    rates = [line["eval_correct_rate"] for line in lines if "eval_correct_rate" in line]
    assert rates[-1] >= rates[0] + 0.2, rates
    assert max(line["logprob_gap_max"] for line in lines if "logprob_gap_max" in line) < TOLERANCE
    for step in (6, 7):  # done twice: before the kill, and again from the checkpoint
        assert lines[step + 1]["loss"] == pytest.approx(killed[step]["loss"], abs=1e-4)
        assert lines[step + 1]["correct_rate"] == killed[step]["correct_rate"]


# ---------------------------------------------------------------- SkyRL-tx on a copy of the built-in tiny model


PYTHON = "RETRAIN_SKYRL_PYTHON"  # interpreter of the virtualenv that SkyRL-tx is installed in
PLACES = 4  # adapters at a time; on a CPU each costs time in every forward
FIXED_SHAPES = {"sample_max_num_sequences": 64, "train_micro_batch_size": 32}  # so that little is compiled
START_S = 180


@dataclass(frozen=True, slots=True, kw_only=True)
class SkyRL:
    """A running server: its URL, and the folder of the model that it was started with, which is the model's name."""

    url: str
    model: Path
    process: subprocess.Popen[bytes]


def copy_model(source: Path, target: Path) -> Path:
    """The model with a config that transformers 4, which the server has, understands as well."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    path = target / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"rope_theta": config["rope_parameters"]["rope_theta"]}), encoding="utf-8")
    return target


@contextmanager
def tiny_server(folder: Path) -> Iterator[SkyRL]:
    """A server of the built-in tiny model; skips the test where SkyRL-tx is not installed."""
    if PYTHON not in os.environ:
        pytest.skip(f"{PYTHON} does not name the Python that SkyRL-tx is installed for: nox -s server-tinker")
    folder.mkdir(exist_ok=True)
    with running(folder, copy_model(BUILTIN_MODELS["tiny"], folder / "tiny")) as started:
        yield started


@contextmanager
def running(folder: Path, model: Path, *, port: int = 0) -> Iterator[SkyRL]:
    """Start a server whose checkpoints and database are in `folder`, wait until it answers, and end it."""
    python = os.environ[PYTHON]
    tools = folder / "bin"
    tools.mkdir(parents=True, exist_ok=True)
    stand_in = tools / "uv"  # the server starts its engine with `uv run ... -m tx.tinker.engine ...`
    stand_in.write_text(f'#!/bin/sh\nwhile [ "$1" != "-m" ]; do shift; done\nexec "{python}" "$@"\n', encoding="utf-8")
    stand_in.chmod(0o755)
    port = port or server_process.free_port()
    sizes = {"max_lora_adapters": PLACES, "max_lora_rank": 16, **FIXED_SHAPES}
    command = [python, "-m", "tx.tinker.api", "--host", "127.0.0.1", "--port", str(port), "--base-model", str(model)]
    command += ["--checkpoints-base", str(folder / "checkpoints"), "--database-url", f"sqlite:///{folder}/tinker.db"]
    command += ["--backend-config", json.dumps(sizes)]
    command += ["--session-timeout-sec", "60", "--session-cleanup-interval-sec", "5"]
    environ = os.environ | {"PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "JAX_PLATFORMS": "cpu"}
    url, log = f"http://127.0.0.1:{port}", folder / "server.log"
    process = server_process.launch(command, log, environ, folder)
    try:
        server_process.wait_for(f"{url}/api/v1/healthz", process, log, START_S)
        yield SkyRL(url=url, model=model, process=process)
    finally:
        server_process.end(process, signal.SIGTERM)
