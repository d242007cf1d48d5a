"""Bytes that live on a card of 16, 24 and 80 GB at full size, next to the plan that chose the packs."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import pytest
import torch

from retrain_local.memory.limits import MemoryLimits
from retrain_local.memory.sizes import Rows
from retrain_local.training.budget import activation_bytes
from tests.fake_gpu.conftest import MakeFolder, warnings_of
from tests.kit.fake_gpu.backends import Load, OnCard, on_card
from tests.kit.fake_gpu.card import H100, RTX_4080, RTX_4090, Card

pytestmark = pytest.mark.fake_gpu
SAMPLED = Load(prompts=8, group=16, prompt=256, new=256)
SMALL = Load(prompts=1, group=2, prompt=256, new=16)
PROMPT = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Expected limits of a shape on a card; `least_used` and `most_used` bound the share of it that training holds."""

    shape: str
    card: Card
    recomputes: bool
    pack_tokens: int
    used: tuple[float, float]


CASES = {
    "0.6B on 16 GB": Case(shape="0.6B", card=RTX_4080, recomputes=False, pack_tokens=4338, used=(0.7, 0.95)),
    "4B on 24 GB": Case(shape="4B", card=RTX_4090, recomputes=False, pack_tokens=3543, used=(0.6, 0.95)),
    "8B on 24 GB": Case(shape="8B", card=RTX_4090, recomputes=True, pack_tokens=11_128, used=(0.75, 0.97)),
    "4B on 80 GB": Case(shape="4B", card=H100, recomputes=False, pack_tokens=14_349, used=(0.5, 0.9)),
}
FIRST = "4B on 24 GB"
PARAMS = [pytest.param(case, id=name, marks=() if name == FIRST else pytest.mark.slow) for name, case in CASES.items()]


def limits_of(card: OnCard) -> MemoryLimits:
    limits: MemoryLimits = card.backend._policies[0].limits
    return limits


def full_pack(tokens: int) -> Load:
    """Return one prompt and its completions with as many tokens as a pack holds, to a few."""
    group = max(1, (tokens - PROMPT) // 1024)
    return Load(prompts=1, group=group, prompt=PROMPT, new=(tokens - PROMPT) // group)


@pytest.mark.parametrize("case", PARAMS)
def test_a_full_pack_fits_as_planned(qwen3: MakeFolder, case: Case, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="retrain"), on_card(qwen3(case.shape), case.card) as card:
        memory = card.gpu.memory
        card.sample(SAMPLED)
        card.train(SMALL, "plan")
        limits = limits_of(card)
        assert (limits.recompute, limits.pack_tokens) == (case.recomputes, case.pack_tokens)
        card.sample(SAMPLED, "sample again")
        card.train(full_pack(limits.pack_tokens), step=1)
        assert not card.faults()
        peak = memory.peaks["train"] / case.card.usable_bytes
        assert case.used[0] < peak < case.used[1], f"{peak:.3f} of {case.card.usable_bytes / 1e9:.1f} GB"
    assert not warnings_of(caplog)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_token_is_planned_with_the_bytes_that_live(qwen3: MakeFolder, recompute: bool) -> None:
    tokens, options = (8192, 16_384), {"gradient_checkpointing": "on" if recompute else "off"}
    with on_card(qwen3("4B", num_hidden_layers=12), options=options) as card:
        card.train(SMALL, "moments")
        for count in tokens:
            card.train(full_pack(count), str(count))
        small, large = (card.gpu.memory.peaks[str(count)] for count in tokens)
        decoder = card.backend._pair.trained
        # each row of 1,330 tokens has a copy of the keys and values of 256
        rows = Rows(repeats=1.25)
        planned = activation_bytes(decoder.shape, decoder.dtype, recompute=recompute, rows=rows)
    lived = (large - small) / (tokens[1] - tokens[0])
    assert 0.95 * lived < planned < 1.1 * lived


def test_the_pool_is_as_large_as_a_call_needs(qwen3: MakeFolder) -> None:
    with on_card(qwen3("tiny")) as card:
        before = card.gpu.memory.live
        card.sample(SAMPLED)
        shape = card.backend._pair.sampler.shape
        token = 2 * shape.layers * shape.kv_heads * shape.head_size * torch.bfloat16.itemsize
        pool = token * limits_of(card).pool_tokens
        assert pool <= card.gpu.memory.live - before < 1.05 * pool
