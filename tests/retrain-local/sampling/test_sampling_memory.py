"""Out of memory while sampling, raised by a decoder that refuses more than it is said to have room for."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import BackendError, SampleRequest, SamplingParams
from retrain_local.attention.packed import PaddedAttend
from retrain_local.attention.pages import PagedKernels
from retrain_local.decoder import Attend, Decoder, Scores
from retrain_local.memory.limits import MemoryLimits
from retrain_local.memory.sizes import BLOCK_SIZE
from retrain_local.sampling import cache, engine
from retrain_local.sampling.cache import Blocks
from retrain_local.sampling.schedule import Row, Schedule, enough_tokens, new_rows
from retrain_local.training import budget
from tests.kit.local_engines import PARAMS, Engines, all_same
from tests.kit.shapes import QWEN3_4B


class SmallMemory:
    """A decoder whose first layer takes at most `tokens` tokens in a pass, the keys that decoding looks at included."""

    def __init__(self, decoder: Decoder, tokens: int, error: type[RuntimeError] = torch.OutOfMemoryError) -> None:
        self._decoder, self.tokens, self.error, self.refused = decoder, tokens, error, 0
        self.shape, self.device, self.dtype = decoder.shape, decoder.device, decoder.dtype
        self.tier, self.mixers, self.routers = decoder.tier, decoder.mixers, decoder.routers

    def hidden(self, ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend) -> torch.Tensor:
        def checked(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
            alone = int((positions_N[1:] != positions_N[:-1] + 1).sum()) + 1  # rows of one token each, when decoding
            held = len(ids_N) * (int(positions_N.max()) + 1) if alone == len(ids_N) else len(ids_N)
            if held > self.tokens:
                self.refused += 1
                raise self.error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")
            return attend(layer, q, k, v, scores)

        return self._decoder.hidden(ids_N, positions_N, checked)

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return self._decoder.logits(hidden_MD)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, RuntimeError], ids=["cuda", "cpu"])
def test_a_halved_pool_is_enough(engines: Engines, caplog: pytest.LogCaptureFixture, error: type[RuntimeError]) -> None:
    memory = SmallMemory(engines.decoder(), 500, error)
    small, delivered = engines.make(memory), list[tuple[int, int]]()
    with caplog.at_level(logging.WARNING, logger="retrain"):
        drawn = small.sample(engines.requests, PARAMS, lambda request, place, _: delivered.append((request, place)))
    assert sorted(delivered) == [(n, i) for n, each in enumerate(engines.requests) for i in range(len(each.seeds_G))]
    assert memory.refused > 0
    assert caplog.text.count("Out of memory in sampling") == memory.refused
    assert f"At most {small._policy.limits.cache_tokens} tokens" in caplog.text
    all_same(drawn, engines.wanted)
    refused = memory.refused
    all_same(small.sample(engines.requests, PARAMS), engines.wanted)
    assert memory.refused == refused, "the smaller pool is kept"
    again = engines.make(memory, pool_tokens=small._policy.limits.cache_tokens)
    all_same(again.sample(engines.requests, PARAMS), small.sample(engines.requests, PARAMS), atol=0.0)


def test_one_row_that_does_not_fit_asks_for_fewer_tokens(engines: Engines) -> None:
    engine = engines.make(SmallMemory(engines.decoder(), 30), stop_ids=frozenset())
    with pytest.raises(BackendError, match="keys and values") as caught:
        engine.sample(engines.requests[:1], PARAMS)
    problem = caught.value.problems[0]
    assert problem.where == "sampling"
    assert "one row of" in problem.what
    assert 1 <= int(problem.fix.split("max_tokens to ")[1].split(",")[0]) < PARAMS.max_tokens


@pytest.mark.parametrize(("pool_tokens", "prompt"), [(16, 1), (48, 2)])
def test_a_pool_that_does_not_hold_one_row_is_an_error(engines: Engines, pool_tokens: int, prompt: int) -> None:
    engine = engines.make(pool_tokens=pool_tokens, stop_ids=frozenset())
    with pytest.raises(BackendError, match="ran out of memory"):
        engine.sample([engines.requests[prompt]], replace(PARAMS, max_tokens=60))


def test_a_pool_that_cannot_be_had_is_halved(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    class Limited(cache.Cache):
        def __init__(self, decoder: Any, tokens: int, kind: str, slots: int) -> None:
            made.append(tokens)
            if tokens > 3000:
                raise torch.OutOfMemoryError("CUDA out of memory")
            super().__init__(decoder, tokens, kind, slots)

    monkeypatch.setattr(engine, "Cache", Limited)
    found = engines.make(pool_tokens=10_000)
    all_same(found.sample(engines.requests, PARAMS), engines.wanted)
    assert made == [10_000, 5000, 2500]
    assert found._policy.limits.cache_tokens == 2500


def test_the_size_is_recorded_at_the_first_call_and_taken_from_a_checkpoint(engines: Engines) -> None:
    engine = engines.make(cache_bytes=2**24)
    layers, key_heads, sides, size, item = 2, 2, 2, 16, 4
    engine.sample(engines.requests, PARAMS)
    assert engine._policy.limits.cache_tokens == 2**23 // (layers * key_heads * sides * size * item)
    engine._policy.limits.restore({"cache_tokens": 640})
    engine.sample(engines.requests, PARAMS)
    assert engine._cache.tokens == 640
    first = engine.sample(engines.requests, PARAMS)
    engine.free_cache()
    assert engine._cache is None
    all_same(engine.sample(engines.requests, PARAMS), first, atol=0.0)


def test_other_errors_are_not_taken_for_want_of_memory(engines: Engines) -> None:
    class Wrong(SmallMemory):
        def hidden(self, ids_N: torch.Tensor, positions_N: torch.Tensor, attend: Attend) -> torch.Tensor:
            raise RuntimeError("shape '[3]' is invalid for input of size 4")

    with pytest.raises(RuntimeError, match="is invalid"):
        engines.make(Wrong(engines.decoder(), 1)).sample(engines.requests, PARAMS)


GPU = torch.device("cuda", 0)
SHORT = SamplingParams(max_tokens=10, temperature=0.8)


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
def test_all_rows_run_at_once_none_is_put_aside(prompts: list[int], group: int, max_tokens: int, share: bool) -> None:
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


def test_a_resumed_run_has_the_pool_that_the_killed_one_had(engines: Engines) -> None:
    kernels = SimpleNamespace(packed=PaddedAttend, paged=PagedKernels())
    both = [engines.make(kernels=kernels, pool_tokens=10_000) for _ in range(2)]
    both[0].sample(requests(30, 20), SHORT)
    saved = both[0]._policy.limits
    both[1]._policy.limits.restore({"cache_tokens": saved.cache_tokens, "pool_tokens": saved.pool_tokens})
    for each in both:
        each.sample(requests(5, 5), SHORT)
    assert both[0]._cache.tokens == both[1]._cache.tokens < 10_000


def test_training_gives_up_its_memory_before_packs_that_no_longer_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    each = budget.activation_bytes(QWEN3_4B, torch.bfloat16, recompute=False)
    limits = MemoryLimits(pack_tokens=3000)
    for free, short in ((3000 * each, False), (3000 * each - 1, True)):
        monkeypatch.setattr(budget, "free_bytes", lambda _, free=free: free)
        assert budget.is_short(QWEN3_4B, torch.bfloat16, GPU, limits) is short
    assert not budget.is_short(QWEN3_4B, torch.bfloat16, GPU, replace(limits, train_tokens=1500))
    assert not budget.is_short(QWEN3_4B, torch.bfloat16, torch.device("cpu"), limits)
