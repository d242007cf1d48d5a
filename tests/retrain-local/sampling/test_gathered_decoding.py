"""Rows in two parts on two threads: the same completions, whatever the machine and its load."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import SampleRequest, SamplingParams
from retrain_local.attention.packed import PaddedAttend, Spans
from retrain_local.decoder import Scores
from retrain_local.sampling import gathered_decoding, prefill
from retrain_local.sampling.cache import Pool
from retrain_local.sampling.decode import Batch
from retrain_local.sampling.gathered_decoding import GatheredAttention
from retrain_local.sampling.prefill import ContinuedAttention, FreshAttention, slots_of
from retrain_local.sampling.schedule import Row, new_rows
from tests.kit.local_engines import Engines, all_same
from tests.kit.shapes import shape

Many = list[SampleRequest]
Seen = list[tuple[int, int]]
PARAMS = SamplingParams(max_tokens=24, temperature=0.8, entropy=True)


@pytest.fixture
def many() -> list[SampleRequest]:
    """Enough rows for two parts until some of them end."""
    rng = np.random.default_rng(3)
    return [
        SampleRequest(prompt_T=rng.integers(0, 500, size=length), seeds_G=tuple(range(100 * length, 100 * length + 4)))
        for length in (7, 33, 17, 2, 9)
    ]


@pytest.fixture
def threads_seen(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Rows and PyTorch's threads of every decoding step, as they come."""
    seen: list[tuple[int, int]] = []
    plain = gathered_decoding.decode_step

    def watched(decoder: Any, attend: Any, batch: Any, **options: Any) -> None:
        seen.append((len(batch.given.ids_B), torch.get_num_threads()))
        plain(decoder, attend, batch, **options)

    monkeypatch.setattr(gathered_decoding, "decode_step", watched)
    return seen


def test_two_parts_are_one(engines: Engines, many: Many, threads_seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    decoder = engines.decoder()
    parts = engines.make(decoder)
    found = parts.sample(many, PARAMS)
    assert {rows for rows, _ in threads_seen} >= {10}  # half of the 20
    parts.close()
    again = engines.make(decoder)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    all_same(again.sample(many, PARAMS), found, atol=0.0)
    monkeypatch.setattr(gathered_decoding, "PART_ROWS_SMALL", 11)
    threads_seen.clear()
    all_same(engines.make(decoder).sample(many, PARAMS), found)
    assert max(rows for rows, _ in threads_seen) == 20


def test_parts_share_threads(engines: Engines, many: Many, threads_seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        engine = engines.make(stop_ids=frozenset())
        engine.sample(many, SamplingParams(max_tokens=2, temperature=1.0))
        assert set(threads_seen) == {(10, 2)}
        assert torch.get_num_threads() == 4
        threads_seen.clear()
        engine.sample(many[:2], SamplingParams(max_tokens=2, temperature=1.0))
        assert set(threads_seen) == {(8, 4)}
        engine.close()
    finally:
        torch.set_num_threads(before)


def test_an_error_leaves_nothing_behind(engines: Engines, many: Many, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    engine = engines.make()
    wanted = engine.sample(many, PARAMS)
    plain = gathered_decoding.decode_step

    for is_main in (True, False):

        def failing(*given: Any, at: bool = is_main, **options: Any) -> None:
            if (threading.current_thread() is threading.main_thread()) == at:
                raise ValueError("broken")
            plain(*given, **options)

        monkeypatch.setattr(gathered_decoding, "decode_step", failing)
        with pytest.raises(ValueError, match="broken"):
            engine.sample(many, PARAMS)
    monkeypatch.setattr(gathered_decoding, "decode_step", plain)
    all_same(engine.sample(many, PARAMS), wanted)
    engine.close()


HEADS, KV_HEADS, SIZE, BLOCK = 4, 2, 8, 4
CPU = torch.device("cpu")
SHAPE = shape(HEADS, KV_HEADS, SIZE)
SINKS = torch.linspace(-1, 2, HEADS)
KINDS = {
    "plain": Scores(scale=0.3),
    "window": Scores(scale=0.3, window=5),
    "softcap": Scores(scale=0.9, softcap=1.5),
    "sinks": Scores(scale=0.3, sinks_H=SINKS),
    "all": Scores(scale=0.9, window=3, softcap=2.0, sinks_H=SINKS),
}
LENGTHS = (11, 1, 6, 23)


def plainly(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scores: Scores) -> torch.Tensor:
    """One row of T tokens, head by head and token by token."""
    found = torch.zeros(len(q), HEADS, SIZE)
    for t in range(len(q)):
        first = 0 if scores.window is None else max(0, t + 1 - scores.window)
        for h in range(HEADS):
            s = scores.scale * (k[first : t + 1, h // (HEADS // KV_HEADS)] @ q[t, h])
            if scores.softcap is not None:
                s = scores.softcap * torch.tanh(s / scores.softcap)
            if scores.sinks_H is not None:
                s = torch.cat([s, scores.sinks_H[h : h + 1]])
            weights = torch.softmax(s, 0)[: t + 1 - first]
            found[t, h] = weights @ v[first : t + 1, h // (HEADS // KV_HEADS)]
    return found


@pytest.fixture
def rows() -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(0)
    return [
        tuple(torch.randn(length, heads, SIZE, generator=generator) for heads in (HEADS, KV_HEADS, KV_HEADS))
        for length in LENGTHS
    ]


def tables() -> list[list[int]]:
    """Blocks in no order, none shared."""
    numbers = iter(np.random.default_rng(0).permutation(np.arange(1, 40)).tolist())
    return [[next(numbers) for _ in range(-(-length // BLOCK))] for length in LENGTHS]


def new_pool(dtype: torch.dtype = torch.float32) -> Pool:
    return Pool(SHAPE, tokens=40 * BLOCK, block_size=BLOCK, kind="auto", dtype=dtype, device=CPU)


def packed(rows: list[tuple[torch.Tensor, ...]], cuts: list[slice]) -> list[torch.Tensor]:
    return [torch.cat([row[side][cut] for row, cut in zip(rows, cuts, strict=True)]) for side in range(3)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mask_elements", [2**24, 30])
def test_prompts_and_what_continues_them(
    rows: list[tuple[torch.Tensor, ...]], kind: str, mask_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefill, "MASK_ELEMENTS", mask_elements)
    scores, pool = KINDS[kind], new_pool()
    wanted = [plainly(*row, scores) for row in rows]
    pasts = [5, 0, 4, 12]
    fresh = [(row, table, past) for row, table, past in zip(rows, tables(), pasts, strict=True) if past]
    slots = torch.from_numpy(np.concatenate([slots_of(table, 0, past, BLOCK) for _, table, past in fresh]))
    spans = Spans.apart([past for *_, past in fresh])
    written = FreshAttention(pool, slots, PaddedAttend(spans, CPU))
    found = written(0, *packed([row for row, *_ in fresh], [slice(0, past) for *_, past in fresh]), scores)
    began = [row[:past] for row, past in zip(wanted, pasts, strict=True) if past]
    torch.testing.assert_close(found, torch.cat(began), atol=1e-5, rtol=1e-5)
    lengths = [length - past for length, past in zip(LENGTHS, pasts, strict=True)]
    slots = torch.from_numpy(
        np.concatenate([slots_of(t, p, n, BLOCK) for t, p, n in zip(tables(), pasts, LENGTHS, strict=True)])
    )
    continued = ContinuedAttention(pool, slots, tables(), pasts, lengths)
    found = continued(0, *packed(rows, [slice(past, None) for past in pasts]), scores)
    rest = [row[past:] for row, past in zip(wanted, pasts, strict=True)]
    torch.testing.assert_close(found, torch.cat(rest), atol=1e-5, rtol=1e-5)


def decoding_rows(cached: list[int]) -> list[Row]:
    requests = [SampleRequest(prompt_T=np.zeros(n + 1, np.int64), seeds_G=(n,)) for n in cached]
    rows = new_rows(requests, SamplingParams(max_tokens=50, temperature=1.0), None, 100)
    for row, table in zip(rows, tables(), strict=True):
        row.blocks = table
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_at_a_time_while_rows_end(rows: list[tuple[torch.Tensor, ...]], kind: str) -> None:
    scores, pool = KINDS[kind], new_pool()
    wanted = [plainly(*row, scores) for row in rows]
    starts = [4, 0, 1, 9]
    live = decoding_rows(starts)
    for row, start, states in zip(live, starts, rows, strict=True):
        slots = torch.from_numpy(slots_of(row.blocks, 0, start, BLOCK))
        pool.write(0, slots, states[1][:start], states[2][:start])
    at = dict(zip((row.request for row in live), starts, strict=True))
    copied: GatheredAttention | None = None
    made = 0
    while live:
        batch = Batch.allocate(len(live), 7, 2, CPU)
        batch.load(live, 1.0, 2, BLOCK)
        if copied is None or not copied.continues(live, 2):
            copied, made = GatheredAttention(pool, live, batch, 6), made + 1
        for step in range(2):
            tokens = [min(at[row.request] + step, LENGTHS[row.request] - 1) for row in live]
            read = [(rows[row.request], token) for row, token in zip(live, tokens, strict=True)]
            states = [torch.stack([row[side][token] for row, token in read]) for side in range(3)]
            found = copied(0, *states, scores)
            for out, row, token in zip(found, live, tokens, strict=True):
                if at[row.request] + step < LENGTHS[row.request]:
                    torch.testing.assert_close(out, wanted[row.request][token], atol=1e-5, rtol=1e-5)
        copied.finish(batch.given.slots_SB)
        for row in live:
            at[row.request] += 2
            row.tokens += [0, 0]
        live = [row for row in live if at[row.request] < LENGTHS[row.request]]
    assert made == 3, "a copy serves three segments, with fewer and fewer rows"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("order", [(0, 0, 0, 1, 1, 1), (0, 1, 0, 1, 0, 0), (1, 0, 0, 0, 0, 0)])
def test_rows_of_a_prompt_read_it_together(order: tuple[int, ...], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathered_decoding, "SHARED_TOKENS", 4)
    scores, pool, cached = KINDS[kind], new_pool(), (8, 5)
    generator = torch.Generator().manual_seed(1)
    lengths = [cached[prompt] + 2 * place + 1 for place, prompt in enumerate(order)]  # the rows end one by one
    sides = HEADS, KV_HEADS, KV_HEADS
    prompts = [[torch.randn(size, heads, SIZE, generator=generator) for heads in sides] for size in cached]
    own = [[torch.randn(2 * place + 1, heads, SIZE, generator=generator) for heads in sides] for place in range(6)]
    rows = [tuple(map(torch.cat, zip(prompts[prompt], own[place], strict=True))) for place, prompt in enumerate(order)]
    wanted = [plainly(*row, scores) for row in rows]
    requests = [SampleRequest(prompt_T=np.full(cached[prompt] + 1, prompt), seeds_G=(0,)) for prompt in order]
    live = new_rows(requests, SamplingParams(max_tokens=50, temperature=1.0), None, 100)
    numbers = iter(np.random.default_rng(0).permutation(np.arange(1, 40)).tolist())
    for row, states in zip(live, rows, strict=True):
        row.blocks = [next(numbers) for _ in range(5)]
        slots = torch.from_numpy(slots_of(row.blocks, 0, row.cached, BLOCK))
        pool.write(0, slots, states[1][: row.cached], states[2][: row.cached])
    copied: GatheredAttention | None = None
    while live:
        batch = Batch.allocate(len(live), 5, 1, CPU)
        batch.load(live, 1.0, 1, BLOCK)
        if copied is None:
            copied = GatheredAttention(pool, live, batch, 12)
        with torch.device("meta"):  # an index that does not name its device would be on another one, as on a card
            assert copied.continues(live, 1)
        states = [torch.stack([rows[row.request][side][row.cached] for row in live]) for side in range(3)]
        for out, row in zip(copied(0, *states, scores), live, strict=True):
            torch.testing.assert_close(out, wanted[row.request][row.cached], atol=1e-5, rtol=1e-5)
        copied.finish(batch.given.slots_SB)
        for row in live:
            row.tokens.append(0)
        live = [row for row in live if row.cached < lengths[row.request]]


@pytest.mark.parametrize("kind", KINDS)
def test_attention_in_bf16_rounds_its_scores_once(rows: list[tuple[torch.Tensor, ...]], kind: str) -> None:
    """Softmax in fp32 of products in bf16: as close to the plain definition as rounding of its inputs allows."""
    scores, pool = KINDS[kind], new_pool(torch.bfloat16)
    live = decoding_rows([0, 0, 0, 0])[:2]
    batch = Batch.allocate(2, 7, 8, CPU)
    batch.load(live, 1.0, 8, BLOCK)
    copied = GatheredAttention(pool, live, batch, 8)
    assert copied.continues(live, 8)
    assert not copied.continues(live, 9), "the copy has no room"
    assert not copied.continues(decoding_rows([4, 0, 1, 9])[1:3], 8), "rows that joined need another copy"
    rounded = [tuple(states.bfloat16().float() for states in row) for row in (rows[0], rows[3])]
    wanted = [plainly(*row, scores) for row in rounded]
    for step in range(8):
        states = [torch.stack([row[side][step] for row in rounded]).bfloat16() for side in range(3)]
        found = copied(0, *states, scores)
        assert found.dtype is torch.bfloat16
        for out, expected in zip(found, wanted, strict=True):
            torch.testing.assert_close(out.float(), expected[step], atol=2e-2, rtol=1e-2)
