"""Small random models and the contexts that a factory receives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import BaseModel
from transformers import GenerationConfig, Qwen3Config, Qwen3ForCausalLM

from retrain.api import PluginContext, SampleRequest, SamplingParams, Seeds, TrainBatch, load_plugins
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.options import LocalOptions, LoraKeys, ModelKeys
from tests.kit.sampled_rows import sampled_rows

VOCABULARY = 512
STOP = (500, 501)


class Model(schema.ModelTable, ModelKeys):
    """`[model]` with the key that this distribution adds."""


class Lora(schema.LoraTable, LoraKeys):
    """`[lora]` with the keys that this distribution adds."""


def qwen3_config(**changes: Any) -> Qwen3Config:
    sizes = {"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 32, "intermediate_size": 384, "vocab_size": VOCABULARY, "max_position_embeddings": 512}
    return Qwen3Config(**(sizes | {"tie_word_embeddings": True, "initializer_range": 0.05} | changes))


def write_model(folder: Path, model: Any) -> Path:
    model.generation_config = GenerationConfig(eos_token_id=list(STOP), temperature=0.3, top_k=2, do_sample=True)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def save_model() -> Callable[[Path, Any], Path]:
    """Write a model together with a generation config full of things that sampling must not heed."""
    return write_model


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)  # these models are too small to share out, least of all on a busy machine


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 whose end-of-sequence ids are drawn often enough to end rows at different lengths."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(qwen3_config())
    with torch.no_grad():
        model.model.embed_tokens.weight[list(STOP)] *= 2.5
    return write_model(tmp_path_factory.mktemp("qwen3"), model)


@pytest.fixture
def make_context(model_folder: Path) -> Callable[..., PluginContext]:
    def make(
        model: str | Path = model_folder,
        *,
        seed: int = 1,
        rank: int = 4,
        devices: str = "cpu",
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        clip: float = 0.0,
        inference: dict[str, Any] | None = None,
        alpha: int = 0,
        options: dict[str, Any] | None = None,
        dtype: str = "auto",
        adapter: str | Path = "",
        quantize: str = "none",
        lora: dict[str, bool] | None = None,
        max_staleness: int = -1,
    ) -> PluginContext:
        tables: dict[str, BaseModel] = {
            "model": Model.model_validate(
                {"model": str(model), "lora_rank": rank, "dtype": dtype, "adapter": str(adapter), "quantize": quantize}
            ),
            "backend": schema.BackendTable(backend="local", devices=devices),
            "lora": Lora.model_validate({"alpha": alpha} | (lora or {})),
            "training": schema.TrainingTable(lr=lr, weight_decay=weight_decay, max_staleness=max_staleness),
            "optimizer": schema.OptimizerTable(grad_clip_norm=clip),
            "inference": InferenceTable(**(inference or {})),
        }
        tokenizer = SimpleNamespace(eos_token_id=STOP[0])
        return PluginContext(
            config=Config(tables=tables),
            seeds=Seeds(seed),
            plugins=load_plugins(),
            tokenizer=tokenizer,
            params=LocalOptions(**(options or {})),
        )

    return make


@pytest.fixture
def make_backend(make_context: Callable[..., PluginContext]) -> Callable[..., LocalBackend]:
    return lambda *args, **options: create_backend(make_context(*args, **options))


@pytest.fixture
def requests() -> list[SampleRequest]:
    """Five prompts of unequal length with unequal numbers of completions."""
    rng = np.random.default_rng(0)
    return [
        SampleRequest(
            prompt_T=rng.integers(0, 500, size=length),
            seeds_G=tuple(int(seed) for seed in rng.integers(0, 2**62, size=count)),
        )
        for length, count in ((7, 4), (3, 5), (12, 1), (1, 3), (9, 4))
    ]


@pytest.fixture
def roll() -> Callable[..., TrainBatch]:
    """Sample from a backend and turn what it gave into the rows of an optimizer step, with random advantages."""

    def make(
        backend: LocalBackend,
        requests: Sequence[SampleRequest],
        *,
        step: int = 0,
        temperature: float = 1.0,
        max_tokens: int = 24,
    ) -> TrainBatch:
        groups = backend.sample(requests, SamplingParams(max_tokens=max_tokens, temperature=temperature))
        rows = sampled_rows(requests, groups, np.random.default_rng(step))
        return TrainBatch(step=step, rows=rows, temperature=temperature)

    return make


@pytest.fixture
def trained(
    make_backend: Callable[..., LocalBackend], requests: Sequence[SampleRequest], roll: Callable[..., TrainBatch]
) -> LocalBackend:
    """A backend whose adapter is no longer zero."""
    backend = make_backend()
    backend.train(roll(backend, requests))
    backend.publish()
    return backend
