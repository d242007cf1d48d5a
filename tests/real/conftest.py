"""SmolLM2-135M-Instruct, which `nox -s real` makes, and the backend on it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import PluginContext, SampleRequest, SamplingParams, Seeds, TrainBatch, load_plugins
from retrain.kernel.config.load import load_config
from retrain.kernel.types import Sample
from retrain.rooms.session.check import registered_tables
from retrain.rooms.text.chat import encode
from retrain.rooms.text.tokenizer.load import load_tokenizer
from retrain_local.backend import LocalBackend, create_backend
from retrain_local.options import LocalOptions
from retrain_local.templates import SMOLLM2
from tests.sampled_rows import sampled_rows

QUESTIONS = ("What is 7 + 5?", "What is 12 + 11?", "Name a colour.", "Write one line about the sea.")


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The folder of the model in bf16, whose numbers fp32 holds exactly."""
    folder = os.environ.get("RETRAIN_SMOLLM2")
    if not folder:
        pytest.skip("needs a real model: `nox -s real` makes it")
    return Path(folder)


@dataclass(frozen=True, kw_only=True)
class Real:
    """The backend of the template `smollm2` with a trained adapter, what it sampled, and the optimizer step of that."""

    dtype: str
    context: PluginContext
    backend: LocalBackend
    requests: tuple[SampleRequest, ...]
    groups: list[list[Sample]]
    batch: TrainBatch
    adapter: Path

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "fp32" else torch.bfloat16


def context_of(folder: Path, dtype: str, path: Path) -> PluginContext:
    """What a run of the template gives to its backend."""
    plugins = load_plugins({})
    path.write_text(SMOLLM2, encoding="utf-8")
    arguments = ("--model", str(folder), "--set", f"model.dtype={dtype}", "--lr", "1e-3")
    config, problems = load_config(path, tables=registered_tables(plugins), arguments=arguments)
    assert not problems
    tokenizer = load_tokenizer(config, plugins)
    return PluginContext(config=config, seeds=Seeds(1), plugins=plugins, tokenizer=tokenizer, params=LocalOptions())


def asked(
    context: PluginContext, questions: Sequence[str] = QUESTIONS, group_size: int = 2
) -> tuple[SampleRequest, ...]:
    """A request per question, through the chat template."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    seeds = [tuple(range(place, place + group_size)) for place in range(0, 1000 * len(questions), 1000)]
    prompts = encode(chats, context.tokenizer, context.config, names=list(questions))
    return tuple(
        SampleRequest(prompt_T=np.array(prompt), seeds_G=own) for prompt, own in zip(prompts, seeds, strict=True)
    )


def batch_of(requests: Sequence[SampleRequest], groups: Sequence[Sequence[Sample]], temperature: float) -> TrainBatch:
    """The optimizer step of what was sampled, with random advantages."""
    rows = sampled_rows(requests, groups, np.random.default_rng(0))
    return TrainBatch(step=0, rows=rows, temperature=temperature)


@pytest.fixture(scope="module", params=["fp32", "bf16"])
def real(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Real:
    """In each dtype, after one optimizer step, so that no factor of the adapter is zero; temperature 0.7."""
    folder = tmp_path_factory.mktemp(request.param)
    context = context_of(smollm2, request.param, folder / "retrain.toml")
    backend = create_backend(context)
    requests = asked(context)
    params = SamplingParams(max_tokens=16, temperature=0.7, entropy=True)
    backend.train(batch_of(requests, backend.sample(requests, params), 0.7))
    backend.publish()
    groups = backend.sample(requests, params)
    backend.save_adapter(folder)
    return Real(
        dtype=request.param,
        context=context,
        backend=backend,
        requests=requests,
        groups=groups,
        batch=batch_of(requests, groups, 0.7),
        adapter=folder,
    )


def plain_model(smollm2: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """The plain path: transformers and PEFT."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype)
    return PeftModel.from_pretrained(base, str(adapter), is_trainable=True)


@pytest.fixture(scope="module")
def peft_model(real: Real, smollm2: Path) -> Any:
    """The plain path in the same dtype, with the same adapter."""
    return plain_model(smollm2, real.adapter, real.torch_dtype)


def plain_logits(model: Any, tokens_T: np.ndarray) -> torch.Tensor:
    """Logits [T-1, vocabulary] in fp32 of one row, without padding, at temperature 0.7."""
    logits: torch.Tensor = model(input_ids=torch.from_numpy(tokens_T)[None]).logits[0, :-1]
    return logits.float() / 0.7
