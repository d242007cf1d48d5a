"""Backend tinker against the real thing: SkyRL-tx with a copy of the built-in tiny model. `nox -s server-tinker`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
from retrain.kernel.config import schema
from retrain_local.plugin import BUILTIN_MODELS
from retrain_local.training.step_loss import NAMED, PolicyLoss
from retrain_tinker.backend import TinkerBackend, create_backend
from retrain_tinker.options import TinkerOptions
from tests.kit.scored_tokens import scored
from tests.servers.skyrl import SkyRL, tiny_server

pytestmark = [pytest.mark.server, pytest.mark.timeout(1800)]
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
        models = {
            "model": schema.ModelTable,
            "training": schema.TrainingTable,
            "algorithm": schema.AlgorithmTable,
            "optimizer": schema.OptimizerTable,
        }
        context = PluginContext(
            config=Config(tables={name: models[name](**values) for name, values in given.items()}),
            seeds=Seeds(1),
            plugins=load_plugins(),
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
    rows = []
    for request, group in zip(
        requests, backend.sample(requests, SamplingParams(max_tokens=32, temperature=1.0)), strict=True
    ):
        for number, sample in enumerate(group):
            ahead, length = len(request.prompt_T), len(request.prompt_T) + len(sample.tokens_T)
            credit = np.where(np.arange(length) >= ahead, (number - 0.4) * (1 + 0.05 * np.arange(length)), 0.0)
            rows.append(
                TrainRow(
                    tokens_T=np.concatenate([request.prompt_T, sample.tokens_T]),
                    action_T=np.arange(length) >= ahead,
                    logprobs_T=np.concatenate([np.zeros(ahead), sample.logprobs_T]),
                    advantages_T=credit,
                )
            )
    return tuple(rows)


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


def test_a_restored_client_goes_on_exactly(backend: Callable[..., TinkerBackend], tmp_path: Path) -> None:
    made = backend()
    batches = []
    for step in range(2):
        made.train(TrainBatch(step=step, rows=rows_of(made, first_seed=20 * step), temperature=1.0))
        made.publish()
    (tmp_path / "saved").mkdir()
    made.save(tmp_path / "saved")
    for step in (2, 3):
        batches.append(TrainBatch(step=step, rows=rows_of(made, first_seed=20 * step), temperature=1.0))
        made.train(batches[-1])
        made.publish()
    straight = load_file(adapter(made, tmp_path / "straight") / "adapter_model.safetensors")
    made.close()
    again = backend()
    again.load(tmp_path / "saved")
    assert again.publish() == 2
    for batch in batches:
        again.train(batch)
        again.publish()
    resumed = load_file(adapter(again, tmp_path / "resumed") / "adapter_model.safetensors")
    assert max(float((straight[name] - resumed[name]).abs().max()) for name in straight) < 1e-6


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
