from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import SampleRequest, SamplingParams
from retrain_local.sampling.cache import Blocks, PrefixCache
from retrain_local.sampling.schedule import NoRoomError, Prefill, Row, Schedule, new_rows

SIZE, STEPS, VOCABULARY = 4, 3, 3
PROMPTS = st.lists(
    st.tuples(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=11), st.integers(1, 5)),
    min_size=1,
    max_size=5,
)


class Ledger:
    """A pool of token prefixes instead of keys and values: what is in a slot tells all tokens up to it."""

    def __init__(self, stop: int) -> None:
        self.stop = {stop}
        self.slots: dict[int, tuple[int, ...]] = {}

    def _slot(self, blocks: Sequence[int], position: int) -> int:
        return blocks[position // SIZE] * SIZE + position % SIZE

    def fill(self, fills: Sequence[Prefill]) -> None:
        copies = {}
        for pair in (fill.copied for fill in fills if fill.copied):
            for place in range(SIZE):
                if pair[0] * SIZE + place in self.slots:
                    copies[pair[1] * SIZE + place] = self.slots[pair[0] * SIZE + place]
        self.slots |= copies
        for fill in fills:
            before: tuple[int, ...] = self.slots[self._slot(fill.blocks, fill.past - 1)] if fill.past else ()
            assert len(before) == fill.past
            for offset, token in enumerate(fill.tokens_T):
                before = (*before, int(token))
                self.slots[self._slot(fill.blocks, fill.past + offset)] = before

    def check(self, row: Row) -> None:
        tokens = tuple(row.prefix_T.tolist())
        for position in range(row.cached):
            assert self.slots[self._slot(row.blocks, position)] == tokens[: position + 1]

    def step(self, row: Row, token: int) -> None:
        """Read the last token, draw one more."""
        self.slots[self._slot(row.blocks, row.cached)] = tuple(row.prefix_T.tolist())
        row.take([token], [-1.0], [], stop=self.stop)


def run(
    rows: list[Row], blocks: Blocks, *, stop: int = VOCABULARY - 1, **options: Any
) -> tuple[Schedule, list[list[int]]]:
    """Play a whole call; the token that a row draws is a function of its seed and of how many it has drawn."""
    given: dict[str, Any] = {"cache": None, "share": True} | options
    schedule, ledger, order = Schedule(rows, blocks, SIZE, **given), Ledger(stop), []
    while schedule.running or schedule.waiting:
        fills = schedule.advance(STEPS)
        for part in (fills.prompts, fills.rest):
            ledger.fill(part)
        order.append([id(row) for row in schedule.running])
        written: Counter[int] = Counter()
        for row in schedule.running:
            ledger.check(row)
            assert len(row.blocks) * SIZE >= row.cached + min(STEPS, row.room)
            written.update(row.blocks[row.cached // SIZE :])
        assert max(written.values()) == 1, "nobody writes where another reads"
        for row in schedule.running:
            for _ in range(min(STEPS, row.room)):
                if row.room:
                    ledger.step(row, hash((row.seed, len(row.tokens))) % VOCABULARY)
        for row in [row for row in schedule.running if not row.room]:
            schedule.retire(row)
    return schedule, order


def rows_of(prompts: Sequence[tuple[list[int], int]], room: int = 9) -> list[Row]:
    requests = [
        SampleRequest(prompt_T=np.array(prompt), seeds_G=tuple(range(7 * n, 7 * n + count)))
        for n, (prompt, count) in enumerate(prompts)
    ]
    return new_rows(requests, SamplingParams(max_tokens=room, temperature=1.0), None, VOCABULARY)


@given(PROMPTS, st.integers(5, 60), st.booleans(), st.booleans(), st.sampled_from([None, 24, 60]))
@settings(deadline=None)
def test_all_rows_end_in_any_pool_that_holds_one_and_no_block_is_lost(
    prompts: list[tuple[list[int], int]], capacity: int, share: bool, keep: bool, batch_tokens: int | None
) -> None:
    drawn = []
    for size in (capacity, 1000):
        blocks = Blocks(size)
        cache = PrefixCache(blocks) if keep else None
        rows = rows_of(prompts)
        schedule, _ = run(rows, blocks, share=share, cache=cache, batch_tokens=batch_tokens)
        assert not any(row.room or row.blocks for row in rows)
        if cache is not None:
            cache.keep_youngest(0)
        assert blocks.free == size
        drawn.append([row.tokens for row in rows])
        if size == 1000 and batch_tokens is None:
            assert schedule.preempted == 0
    assert drawn[0] == drawn[1], "nothing depends on the size of the pool"


@given(PROMPTS, st.integers(5, 30))
@settings(deadline=None, max_examples=30)
def test_the_same_rows_are_scheduled_the_same_way(prompts: list[tuple[list[int], int]], capacity: int) -> None:
    orders = []
    for _ in range(2):
        rows = rows_of(prompts)
        places = {id(row): place for place, row in enumerate(rows)}
        _, order = run(rows, Blocks(capacity))
        orders.append([[places[row] for row in running] for running in order])
        assert all(running == sorted(running) for running in orders[-1])
    assert orders[0] == orders[1]


def test_the_oldest_rows_run_and_the_youngest_wait() -> None:
    rows = rows_of([([0, 1, 0], 6)], room=40)
    places = {id(row): place for place, row in enumerate(rows)}
    schedule, order = run(rows, Blocks(14), stop=-1)
    assert schedule.preempted == 0, "room ahead is kept for those that run"
    assert [places[row] for row in order[0]] == list(range(len(order[0])))
    assert len(order[0]) < 6


def test_a_row_that_does_not_fit_alone_is_an_error() -> None:
    with pytest.raises(NoRoomError):
        run(rows_of([([0] * 11, 2)]), Blocks(2), stop=-1)
    with pytest.raises(NoRoomError):
        run(rows_of([([0], 1)], room=60), Blocks(1), stop=-1)


def test_prompts_are_counted_once_and_kept_rows_are_continued() -> None:
    blocks = Blocks(100)
    cache = PrefixCache(blocks)
    first = rows_of([([0] * 9, 3)])
    schedule, _ = run(first, blocks, cache=cache)
    assert (schedule.prompt_tokens, schedule.computed_tokens) == (24, 8)
    longer = [([*row.prefix_T.tolist(), 1, 0], 1) for row in first]
    again = rows_of(longer)
    schedule = Schedule(again, blocks, SIZE, cache=cache, share=True)
    fills = schedule.advance(STEPS)
    assert [fill.past for fill in fills.rest] == [row.cached for row in first]
    assert [len(fill.tokens_T) for fill in fills.rest] == [2, 2, 2]
    blocks = Blocks(100)
    cache = PrefixCache(blocks)
    (row,) = rows_of([([0] * 9, 1)])
    run([row], blocks, cache=cache)
    group = rows_of([([*row.prefix_T.tolist(), 1, 0], 3)])
    fills = Schedule(group, blocks, SIZE, cache=cache, share=True).advance(STEPS)
    assert [(fill.past, len(fill.tokens_T)) for fill in fills.prompts] == [(row.cached, 2)], "so does a group, once"


def test_rows_kept_give_way_oldest_first() -> None:
    blocks = Blocks(12)
    cache = PrefixCache(blocks)
    first, second = rows_of([([0] * 5, 1), ([1] * 5, 1)])
    for row in (first, second):
        run([row], blocks, cache=cache, stop=-1)
    assert len(cache) == 2
    run(rows_of([([0, 1] * 5, 1)], room=16), blocks, cache=cache, stop=-1)
    assert cache.longest(first.prefix_T) is None
    assert cache.longest(second.prefix_T) is not None
