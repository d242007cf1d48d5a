"""Pools that round keys and values: how far what they say of a token is from the exact model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import SampleRequest, SamplingParams
from tests.kit.local_engines import Engines, Plain, all_same
from tests.kit.shared import first_or_long

PARAMS = SamplingParams(max_tokens=40, temperature=0.8)
GAPS = {"bf16": (3e-3, 2e-2), "int8": (1e-2, 6e-2), "fp8": (4e-2, 2.5e-1)}  # mean and largest, nats per token


def gaps(plain: Plain, requests: list[SampleRequest], groups: list[list[Any]]) -> np.ndarray:
    """Of every sampled token, |what the engine said - what the exact model says after the same tokens|."""
    found = []
    for request, group in zip(requests, groups, strict=True):
        for sample in group:
            row = np.concatenate([request.prompt_T, sample.tokens_T])
            with torch.no_grad():
                logits = plain.model(input_ids=torch.from_numpy(row)[None]).logits[0, len(request.prompt_T) - 1 : -1]
            exact = torch.log_softmax(logits.double() / PARAMS.temperature, -1)
            found.append(exact.gather(1, torch.from_numpy(sample.tokens_T)[:, None])[:, 0].numpy() - sample.logprobs_T)
    return np.abs(np.concatenate(found))


@pytest.mark.parametrize("kind", first_or_long(GAPS))
def test_the_gap_is_small_and_not_nothing(engines: Engines, kind: str) -> None:
    engine = engines.make(cache_dtype=kind)
    found = gaps(engines.plain, engines.requests, engine.sample(engines.requests, PARAMS))
    mean, largest = GAPS[kind]
    assert 1e-6 < found.mean() < mean
    assert found.max() < largest


@pytest.mark.parametrize("kind", first_or_long(GAPS))
def test_put_aside_and_turns_work_in_every_pool(engines: Engines, kind: str) -> None:
    engine = engines.make(cache_dtype=kind, pool_tokens=192, keep_rows=True)
    groups = engine.sample(engines.requests, PARAMS)
    longer = [
        SampleRequest(prompt_T=np.concatenate([r.prompt_T, g[0].tokens_T, [1, 2]]), seeds_G=(1,))
        for r, g in zip(engines.requests, groups, strict=True)
    ]
    for asked, drawn in ((engines.requests, groups), (longer, engine.sample(longer, PARAMS))):
        assert gaps(engines.plain, asked, drawn).mean() < GAPS[kind][0]


def test_a_sampler_in_bf16(engines: Engines) -> None:
    engine = engines.make(engines.decoder(dtype=torch.bfloat16))
    found = gaps(engines.plain, engines.requests, engine.sample(engines.requests, PARAMS))
    assert 1e-5 < found.mean() < 2e-2
    assert engine._cache is not None
    assert engine._cache.pool.layers[0].keys.dtype is torch.bfloat16


@pytest.mark.parametrize("kind", first_or_long(["auto", "int8"]))
def test_the_same_work_twice_is_the_same_to_the_last_bit(engines: Engines, kind: str) -> None:
    first, second = (engines.make(cache_dtype=kind, pool_tokens=320).sample(engines.requests, PARAMS) for _ in range(2))
    all_same(first, second, atol=0.0)
