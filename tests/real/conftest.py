"""SmolLM2-135M-Instruct, which `nox -s real` makes, and the backend on it."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import PluginContext, SampleRequest, SamplingParams, Seeds, TrainBatch, load_plugins
from retrain.kernel.config.load import load_config
from retrain.kernel.types import Sample
from retrain.run.tables import registered_tables
from retrain.text.chat import encode
from retrain.text.tokenizer import load_tokenizer
from retrain_local.backend import LocalBackend
from retrain_local.factory import create_backend
from retrain_local.model import qlora
from retrain_local.options import LocalOptions
from retrain_local.templates import SMOLLM2
from retrain_local.training.trainer import Trainer
from tests.kit.sampled_rows import sampled_rows

KINDS: dict[str, tuple[str, ...]] = {
    "fp32": ("--lr", "1e-3"),
    "bf16": ("--lr", "1e-3", "--set", "model.dtype=bf16"),
    "full": ("--lr", "1e-5", "--lora-rank", "0"),
    "nf4": ("--lr", "1e-3", "--set", "model.quantize=nf4"),
    "int8": ("--lr", "1e-3", "--set", "model.quantize=int8"),
}
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
    """The backend of the template `smollm2` after a step, what it then sampled, and the optimizer step of that.

    Adapters in both dtypes, all weights, and adapters on quantised ones, by their names in `KINDS`.
    """

    kind: str
    context: PluginContext
    backend: LocalBackend
    requests: tuple[SampleRequest, ...]
    groups: list[list[Sample]]
    batch: TrainBatch
    adapter: Path

    @property
    def dtype(self) -> str:
        return "bf16" if self.kind == "bf16" else "fp32"

    @property
    def trainer(self) -> Trainer:
        assert self.backend._trainer is not None
        return self.backend._trainer

    @property
    def torch_dtype(self) -> torch.dtype:
        return torch.float32 if self.dtype == "fp32" else torch.bfloat16


def context_of(folder: Path, kind: str, path: Path) -> PluginContext:
    """What a run of the template gives to its backend."""
    plugins = load_plugins({})
    path.write_text(SMOLLM2(), encoding="utf-8")
    arguments = ("--model", str(folder), *KINDS[kind])
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
    prompts = encode(chats, context.tokenizer, context.config.data.template_args, names=list(questions))
    return tuple(
        SampleRequest(prompt_T=np.array(prompt), seeds_G=own) for prompt, own in zip(prompts, seeds, strict=True)
    )


def batch_of(requests: Sequence[SampleRequest], groups: Sequence[Sequence[Sample]], temperature: float) -> TrainBatch:
    """The optimizer step of what was sampled, with random advantages."""
    rows = sampled_rows(requests, groups, np.random.default_rng(0))
    return TrainBatch(step=0, rows=rows, temperature=temperature)


@pytest.fixture(scope="module", params=KINDS)
def real(request: pytest.FixtureRequest, smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Real]:
    """Each kind after one optimizer step, so that no factor of the adapter is zero; temperature 0.7."""
    if request.param == "nf4":
        pytest.importorskip("bitsandbytes")
    folder = tmp_path_factory.mktemp(request.param)
    context = context_of(smollm2, request.param, folder / "retrain.toml")
    backend = create_backend(context)
    requests = asked(context)
    params = SamplingParams(max_tokens=16, temperature=0.7, entropy=True)
    backend.train(batch_of(requests, backend.sample(requests, params), 0.7))
    backend.publish()
    groups = backend.sample(requests, params)
    if request.param != "full":
        backend.save_adapter(folder)
    yield Real(
        kind=request.param,
        context=context,
        backend=backend,
        requests=requests,
        groups=groups,
        batch=batch_of(requests, groups, 0.7),
        adapter=folder,
    )
    backend.close()


def plain_model(smollm2: Path, real: Real, dtype: torch.dtype) -> Any:
    """The plain path: transformers and PEFT, with the same numbers."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype)
    if real.kind == "full":
        assert real.backend._pair is not None
        assert not base.load_state_dict(real.backend._pair.adapter, strict=False).unexpected_keys
        return base
    with torch.no_grad():
        for name, module in base.named_modules() if real.kind in qlora.KINDS else ():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(qlora.KINDS[real.kind](module.weight).expanded(dtype))
    return PeftModel.from_pretrained(base, str(real.adapter), is_trainable=True)


@pytest.fixture(scope="module")
def plain(real: Real, smollm2: Path) -> Any:
    """The plain path in the same dtype."""
    return plain_model(smollm2, real, real.torch_dtype)


def plain_logits(model: Any, tokens_T: np.ndarray) -> torch.Tensor:
    """Logits [T-1, vocabulary] in fp32 of one row, without padding, at temperature 0.7."""
    logits: torch.Tensor = model(input_ids=torch.from_numpy(tokens_T)[None]).logits[0, :-1]
    return logits.float() / 0.7
