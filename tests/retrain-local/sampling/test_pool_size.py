"""The pool is as large as a step needs, so that training leaves it, and the CUDA graphs over it, where they are."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import SampleRequest, SamplingParams
from retrain_local.attention.packed import PaddedAttend
from retrain_local.attention.pages import PagedKernels
from retrain_local.memory.limits import MemoryLimits
from retrain_local.memory.sizes import BLOCK_SIZE
from retrain_local.sampling.cache import Blocks, bytes_per_token
from retrain_local.sampling.schedule import Row, Schedule, enough_tokens, new_rows
from retrain_local.training import budget
from tests.kit.local_engines import Engines
from tests.kit.shapes import QWEN3_4B

GPU = torch.device("cuda", 0)
PARAMS = SamplingParams(max_tokens=10, temperature=0.8)


def requests(*prompts: int, group: int = 3) -> list[SampleRequest]:
    rng = np.random.default_rng(sum(prompts))
    seeds = tuple(range(group))
    return [SampleRequest(prompt_T=rng.integers(0, 500, size=length), seeds_G=seeds) for length in prompts]


def rows_of(prompts: list[int], group: int, max_tokens: int) -> list[Row]:
    params = SamplingParams(max_tokens=max_tokens, temperature=1.0)
    return new_rows(requests(*prompts, group=group), params, None, 500)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.integers(1, 70), min_size=1, max_size=6),
    group=st.integers(1, 5),
    max_tokens=st.integers(1, 90),
    share=st.booleans(),
)
def test_all_rows_run_at_once_and_none_is_put_aside(
    prompts: list[int], group: int, max_tokens: int, share: bool
) -> None:
    rows = rows_of(prompts, group, max_tokens)
    tokens = enough_tokens(rows, 0, share=share, keep_rows=False)
    longest = -(-(max(prompts) + max_tokens) // BLOCK_SIZE) * BLOCK_SIZE
    assert tokens <= len(rows) * longest + len(prompts) * BLOCK_SIZE
    schedule = Schedule(rows, Blocks(tokens // BLOCK_SIZE), BLOCK_SIZE, cache=None, share=share)
    schedule.advance(8)
    assert len(schedule.running) == len(rows)
    while schedule.running:
        for row in list(schedule.running):
            row.take([1] * 8, [0.0] * 8, [], stop=())
            if not row.room:
                schedule.retire(row)
        schedule.advance(8)
    assert schedule.preempted == 0


def test_a_pool_that_holds_them_stays_and_a_larger_one_comes_at_need() -> None:
    first = enough_tokens(rows_of([200, 150], 16, 1024), 0, share=True, keep_rows=False)
    assert first == 32 * 1232 + 2 * BLOCK_SIZE
    options = {"share": True, "keep_rows": False}
    assert enough_tokens(rows_of([260, 240], 16, 1024), first, **options) == first  # a group shares its prompt
    assert enough_tokens(rows_of([20, 20], 16, 512), first, **options) == first
    assert enough_tokens(rows_of([200, 150], 24, 1024), first, **options) == 48 * 1232 + 2 * BLOCK_SIZE
    episode = enough_tokens(rows_of([200, 150], 16, 1024), 0, share=True, keep_rows=True)
    assert episode == 2 * first, "the next turn is longer"


@pytest.mark.slow
def test_a_resumed_run_has_the_pool_that_the_killed_one_had(engines: Engines) -> None:
    kernels = SimpleNamespace(packed=PaddedAttend, paged=PagedKernels())
    both = [engines.make(kernels=kernels, pool_tokens=10_000) for _ in range(2)]
    both[0].sample(requests(30, 20), PARAMS)
    saved = both[0]._policy.limits
    both[1]._policy.limits.restore({"cache_tokens": saved.cache_tokens, "pool_tokens": saved.pool_tokens})
    for engine in both:
        engine.sample(requests(5, 5), PARAMS)
    assert both[0]._cache is not None
    assert both[1]._cache is not None
    assert both[0]._cache.tokens == both[1]._cache.tokens < 10_000


def test_a_4b_model_trains_beside_the_pool_of_128_completions_on_an_h100(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 GB of weights and 24 GB of keys and values leave 6,000 tokens of activations; 80 % of the rest left 1,800."""
    rows = rows_of([256] * 8, 16, 1024)
    tokens = enough_tokens(rows, 0, share=True, keep_rows=False)
    each = bytes_per_token(QWEN3_4B, "auto", torch.bfloat16)
    assert 24e9 < tokens * each < 25e9
    free = 80e9 - 2 * QWEN3_4B.parameters
    for pool_bytes, short in ((tokens * each, False), (0.8 * free, True)):
        monkeypatch.setattr(budget, "free_bytes", lambda _, left=int(free - pool_bytes): left)
        assert budget.is_short(QWEN3_4B, torch.bfloat16, GPU, MemoryLimits()) is short


def test_training_gives_up_its_memory_before_packs_that_no_longer_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    each = budget.activation_bytes(QWEN3_4B, torch.bfloat16, recompute=False)
    limits = MemoryLimits(pack_tokens=3000)
    for free, short in ((3000 * each, False), (3000 * each - 1, True)):
        monkeypatch.setattr(budget, "free_bytes", lambda _, free=free: free)
        assert budget.is_short(QWEN3_4B, torch.bfloat16, GPU, limits) is short
    assert not budget.is_short(QWEN3_4B, torch.bfloat16, GPU, replace(limits, train_tokens=1500))
    assert not budget.is_short(QWEN3_4B, torch.bfloat16, torch.device("cpu"), limits)
