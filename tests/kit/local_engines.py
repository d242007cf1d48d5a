"""Engines on a small random model, and the completions that transformers gives for the same requests."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from retrain.api import Sample, SampleRequest, SamplingParams, StopReason, generator
from retrain_local.attention.packed import PaddedAttend
from retrain_local.attention.pages import PagedKernels
from retrain_local.decoder import Decoder
from retrain_local.model.pair import LocalPolicy
from retrain_local.sampling.engine import PytorchEngine
from tests.kit.local_backend import STOP, Local

PARAMS = SamplingParams(max_tokens=40, temperature=0.8, entropy=True)
CPU = torch.device("cpu")


def paged(kernels: PagedKernels | None = None) -> Any:
    """Kernels as a GPU has them, by their definition."""
    return SimpleNamespace(packed=PaddedAttend, paged=kernels or PagedKernels())


def make_engine(
    decoder: Decoder, *, pool_tokens: int = 0, stop_ids: Any = STOP, kernels: Any = None, **options: Any
) -> PytorchEngine:
    """An engine whose pool holds so many tokens."""
    policy = LocalPolicy(
        sampler=decoder,
        device=CPU,
        model_path="",
        stop_ids=frozenset(stop_ids),
        context_limit=decoder.shape.context,
        save_adapter=lambda folder: None,
        logprobs=lambda rows, temperature: [],
    )
    policy.limits.cache_tokens = pool_tokens
    return PytorchEngine(policy, kernels or SimpleNamespace(packed=PaddedAttend, paged=None), **options)


class Plain:
    """One row, no cache, no batch, through transformers."""

    def __init__(self, folder: Path, dtype: torch.dtype = torch.float32) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    def sample(self, request: SampleRequest, seed: int, params: SamplingParams) -> Sample:
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
            if token in STOP:
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


@dataclass(frozen=True)
class Engines:
    """Engines of one model; `requests` are shorter and longer than a block, with unequal numbers of completions."""

    local: Local
    requests: list[SampleRequest]

    def decoder(self, model: Any = "", dtype: torch.dtype | None = None) -> Decoder:
        """Return the sampling decoder; its adapter is still zero."""
        return self.local.pair(model, seed=1, sampler_dtype=dtype).sampler

    def make(self, decoder: Any = None, **options: Any) -> PytorchEngine:
        return make_engine(decoder or self._shared, **options)

    @cached_property
    def _shared(self) -> Decoder:
        return self.decoder()

    @cached_property
    def plain(self) -> Plain:
        return Plain(self.local.folder)

    @cached_property
    def wanted(self) -> list[list[Sample]]:
        """The completions that every engine must make of `requests` with `PARAMS`."""
        return self.plain.all(self.requests, PARAMS)


def all_same(left: Sequence[Sequence[Sample]], right: Sequence[Sequence[Sample]], *, atol: float = 1e-4) -> None:
    for ours, theirs in zip(left, right, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert a.tokens_T.tolist() == b.tokens_T.tolist()
            assert a.stop_reason == b.stop_reason
            np.testing.assert_allclose(a.logprobs_T, b.logprobs_T, atol=atol)
            assert (a.entropies_T is None) == (b.entropies_T is None)
            if a.entropies_T is not None and b.entropies_T is not None:
                np.testing.assert_allclose(a.entropies_T, b.entropies_T, atol=atol)
