"""The local backend on a small random model: contexts, backends, and optimizer steps of what they sample."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from pydantic import BaseModel
from transformers import GenerationConfig

from retrain.api import PluginContext, SampleRequest, SamplingParams, Seeds, TrainBatch, load_plugins
from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain_local.factory import create_backend
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import KEY, find_source
from retrain_local.model.pair import Pair
from retrain_local.options import LocalOptions, LoraKeys, ModelKeys
from tests.kit.sampled_rows import sampled_rows

STOP = (500, 501)
REQUESTS = [  # for a vocabulary of 200
    SampleRequest(prompt_T=np.arange(5, 5 + length) * 7 % 190 + 3, seeds_G=tuple(range(seed, seed + count)))
    for length, seed, count in ((3, 1, 3), (9, 5, 3), (1, 9, 1))
]
SIZES: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 16, "intermediate_size": 128, "vocab_size": 512, "max_position_embeddings": 512}


class Model(schema.ModelTable, ModelKeys):
    """`[model]` with the key that this distribution adds."""


class Lora(schema.LoraTable, LoraKeys):
    """`[lora]` with the keys that this distribution adds."""


def write_model(folder: Path, model: Any) -> Path:
    """Write a model together with a generation config full of settings that sampling must ignore."""
    model.generation_config = GenerationConfig(eos_token_id=list(STOP), temperature=0.3, top_k=2, do_sample=True)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Local:
    """Backends of the model in `folder`; `requests` are five prompts of unequal length and numbers of completions."""

    folder: Path
    requests: Sequence[SampleRequest]

    def context(
        self,
        model: str | Path = "",
        *,
        seed: int = 1,
        rank: int = 4,
        devices: str = "cpu",
        lr: float = 1e-2,
        weight_decay: float = 0.0,
        clip: float = 0.0,
        inference: dict[str, Any] | None = None,
        options: dict[str, Any] | None = None,
        lora: dict[str, Any] | None = None,
        alpha: int = 0,
        max_staleness: int = -1,
        tables: dict[str, BaseModel] | None = None,
        **keys: Any,
    ) -> PluginContext:
        """Return what a factory gets; `keys` are of `[model]`."""
        given = {name: str(value) for name, value in keys.items()} | {"model": str(model or self.folder)}
        found: dict[str, BaseModel] = {
            "model": Model.model_validate(given | {"lora_rank": rank}),
            "backend": schema.BackendTable(backend="local", devices=devices),
            "lora": Lora.model_validate({"alpha": alpha} | (lora or {})),
            "training": schema.TrainingTable(lr=lr, weight_decay=weight_decay, max_staleness=max_staleness),
            "optimizer": schema.OptimizerTable(grad_clip_norm=clip),
            "inference": InferenceTable(**(inference or {})),
        }
        return PluginContext(
            config=Config(tables=found | (tables or {})),
            seeds=Seeds(seed),
            plugins=load_plugins(),
            tokenizer=SimpleNamespace(eos_token_id=STOP[0]),
            params=LocalOptions(**(options or {})),
        )

    def make(self, *given: Any, **options: Any) -> Any:
        return create_backend(self.context(*given, **options))

    def pair(self, model: str | Path = "", *, seed: int = 3, **options: Any) -> Pair:
        """Return the decoders of a model; `options` are of `context`, or places of its samplers."""
        places = {name: options.pop(name) for name in ("sampler_dtype", "sampler_devices") if name in options}
        context = self.context(model, **options)
        source = find_source(context.config.model.model, context.config.place(KEY), context.plugins)
        return create_pair(context.config, source, trainer_device=torch.device("cpu"), seed=seed, **places)

    def roll(
        self,
        backend: Any,
        *,
        step: int = 0,
        temperature: float = 1.0,
        max_tokens: int = 24,
        requests: Sequence[SampleRequest] | None = None,
    ) -> TrainBatch:
        """Sample from a backend, and return the optimizer step of its completions with random advantages."""
        asked = self.requests if requests is None else requests
        groups = backend.sample(asked, SamplingParams(max_tokens=max_tokens, temperature=temperature))
        rows = sampled_rows(asked, groups, np.random.default_rng(step))
        return TrainBatch(step=step, rows=rows, temperature=temperature)

    def trained(self, steps: int = 1, **options: Any) -> Any:
        """Return a backend after so many steps, each published: its adapter is no longer zero."""
        backend = self.make(**options)
        for step in range(steps):
            backend.train(self.roll(backend, step=step))
            backend.publish()
        return backend


def saved(folder: Path, save: Any) -> Path:
    """Return the folder once `save` has written to it."""
    folder.mkdir()
    save(folder)
    return folder


def check_resumes(local: Local, straight: Any, resumed: Any, step: int) -> None:
    """The step of a resumed backend is the one of the backend that went on, to the last bit."""
    batches = [local.roll(backend, step=step) for backend in (straight, resumed)]
    check_same_rows(*batches)
    reports = [backend.train(batch) for backend, batch in zip((straight, resumed), batches, strict=True)]
    assert reports[0] == reports[1]
    assert straight.publish() == resumed.publish() == step + 1
    weights, others = straight._pair.adapter, resumed._pair.adapter
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def check_same_rows(found: TrainBatch, expected: TrainBatch) -> None:
    for left, right in zip(found.rows, expected.rows, strict=True):
        assert left.tokens_T.tolist() == right.tokens_T.tolist()
        assert left.logprobs_T.tobytes() == right.logprobs_T.tobytes()
