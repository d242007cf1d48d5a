"""Engines on a small random model, and what they must give, said plainly through transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from retrain.api import PluginContext, Sample, SampleRequest, SamplingParams, StopReason, generator
from retrain_local.attention.packed import PaddedAttend
from retrain_local.decoder import Decoder
from retrain_local.model.load import create_pair
from retrain_local.model.model_files import KEY, find_source
from retrain_local.model.pair import LocalPolicy
from retrain_local.sampling.engine import PytorchEngine

STOP = frozenset({500, 501})
PARAMS = SamplingParams(max_tokens=40, temperature=0.8, entropy=True)
CPU = torch.device("cpu")


def on_cpu() -> Any:
    """Kernels of a device that has none of its own."""
    return SimpleNamespace(packed=PaddedAttend, paged=None)


@pytest.fixture
def load_sampler(make_context: Callable[..., PluginContext]) -> Callable[..., Decoder]:
    """The sampling decoder of a model folder; its adapter is still zero."""

    def load(*args: Any, dtype: torch.dtype | None = None) -> Decoder:
        context = make_context(*args)
        source = find_source(context.config.model.model, KEY, context.plugins)
        return create_pair(context.config, source, trainer_device=CPU, sampler_dtype=dtype, seed=1).sampler

    return load


def policy_of(decoder: Decoder, stop_ids: frozenset[int] = STOP) -> LocalPolicy:
    return LocalPolicy(
        sampler=decoder,
        device=CPU,
        model_path="",
        stop_ids=stop_ids,
        context_limit=decoder.shape.context,
        save_adapter=lambda folder: None,
        logprobs=lambda rows, temperature: [],
    )


@pytest.fixture
def make_engine(load_sampler: Callable[..., Decoder]) -> Callable[..., PytorchEngine]:
    """An engine; `pool_tokens` is how many tokens its pool holds."""

    def make(
        decoder: Decoder | None = None,
        *,
        pool_tokens: int = 0,
        stop_ids: frozenset[int] = STOP,
        kernels: Any = None,
        **options: Any,
    ) -> PytorchEngine:
        policy = policy_of(decoder or load_sampler(), stop_ids)
        policy.limits.cache_tokens = pool_tokens
        return PytorchEngine(policy, kernels or on_cpu(), **options)

    return make


class Plain:
    """One row, no cache, no batch, through transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def sample(self, request: SampleRequest, seed: int, params: SamplingParams, stop: frozenset[int] = STOP) -> Sample:
        tokens: list[int] = list(request.prompt_T)
        logprobs, entropies, reason = [], [], StopReason.LENGTH
        for u in generator(seed).random(params.max_tokens):
            with torch.no_grad():
                logits = self.model(input_ids=torch.tensor([tokens])).logits[0, -1]
            all_logprobs = torch.log_softmax(logits.double() / params.temperature, -1)
            token = int(torch.searchsorted(all_logprobs.exp().cumsum(0), torch.tensor(u).double(), right=True))
            tokens.append(token)
            logprobs.append(float(all_logprobs[token]))
            entropies.append(float(-(all_logprobs.exp() * all_logprobs).sum()))
            if token in stop:
                reason = StopReason.EOS
                break
        return Sample(
            tokens_T=np.array(tokens[len(request.prompt_T) :]),
            logprobs_T=np.array(logprobs),
            entropies_T=np.array(entropies),
            stop_reason=reason,
            policy_version=0,
        )

    def all(self, requests: Sequence[SampleRequest], params: SamplingParams) -> list[list[Sample]]:
        return [[self.sample(request, seed, params) for seed in request.seeds_G] for request in requests]


@pytest.fixture(scope="session")
def plain(model_folder: Path) -> Plain:
    return Plain(model_folder)


@pytest.fixture(scope="session")
def make_plain() -> Callable[..., Plain]:
    return Plain


@pytest.fixture(scope="session")
def wanted(plain: Plain, requests: list[SampleRequest]) -> list[list[Sample]]:
    """What every engine must make of `requests` with `PARAMS`."""
    return plain.all(requests, PARAMS)


def same(left: Sample, right: Sample, *, atol: float = 1e-4) -> None:
    assert left.tokens_T.tolist() == right.tokens_T.tolist()
    np.testing.assert_allclose(left.logprobs_T, right.logprobs_T, atol=atol)
    assert (left.entropies_T is None) == (right.entropies_T is None)
    if left.entropies_T is not None and right.entropies_T is not None:
        np.testing.assert_allclose(left.entropies_T, right.entropies_T, atol=atol)
    assert left.stop_reason == right.stop_reason


def all_same(left: Sequence[Sequence[Sample]], right: Sequence[Sequence[Sample]], *, atol: float = 1e-4) -> None:
    for ours, theirs in zip(left, right, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            same(a, b, atol=atol)


@pytest.fixture
def check_all_same() -> Callable[..., None]:
    return all_same


@pytest.fixture(scope="session")
def requests() -> list[SampleRequest]:
    """Prompts of unequal length, shorter and longer than a block, with unequal numbers of completions."""
    rng = np.random.default_rng(5)
    return [
        SampleRequest(
            prompt_T=rng.integers(0, 500, size=length), seeds_G=tuple(range(100 * length, 100 * length + count))
        )
        for length, count in ((7, 4), (33, 4), (17, 1), (1, 2), (9, 3), (16, 2), (50, 2))
    ]
