from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from retrain_local.sampling.cache import Blocks, Pool, Prefix, PrefixCache, bytes_per_token
from tests.kit.shapes import shape

SHAPE = shape(4, 2, 8, 6, layers=2)
CPU = torch.device("cpu")
# largest error of a number, as a share of the largest number of its vector
ERRORS = {"auto": 0.0, "bf16": 2.0**-8, "int8": 0.5 / 127 + 1e-6, "fp8": 2.0**-4}


def make(kind: str, **changes: Any) -> Pool:
    given: dict[str, Any] = {"tokens": 64, "block_size": 4, "kind": kind, "dtype": torch.float32, "device": CPU}
    return Pool(SHAPE, **(given | changes))


def states(seed: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(tokens, 2, size, generator=generator) * 3 for size in (8, 6))  # type: ignore[return-value]


def read(pool: Pool, layer: int, slots: list[int]) -> list[torch.Tensor]:
    return [x[0].transpose(0, 1) for x in pool.read(layer, torch.tensor([slots]))]


@pytest.mark.parametrize("kind", ERRORS)
def test_what_was_written_is_read_within_the_rounding_of_the_storage(kind: str) -> None:
    pool = make(kind)
    slots = [5, 6, 7, 40, 12]
    assert not any(found.any() for found in read(pool, 0, [0, 3, 63])), "what was never written is zero"
    pool.write(0, torch.tensor([3]), torch.zeros(1, 2, 8), torch.zeros(1, 2, 6))
    assert not any(found.any() for found in read(pool, 0, [3])), "and zeros stay zero"
    tensors = [tensor for pages in pool.layers for side in pages.sides for tensor in side if tensor is not None]
    held = sum(t.numel() * t.element_size() for t in tensors)
    assert held == pool.num_blocks * pool.block_size * bytes_per_token(SHAPE, kind, torch.float32)
    for layer in (0, 1):
        pool.write(layer, torch.tensor(slots), *states(layer, 5))
    for layer in (0, 1):
        for found, wanted in zip(read(pool, layer, slots), states(layer, 5), strict=True):
            assert ((found - wanted).abs() <= ERRORS[kind] * wanted.abs().amax(-1, keepdim=True)).all()
            assert torch.equal(found, pool.rounded(wanted))


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_stays_visible(kind: str, bad: float) -> None:
    pool = make(kind)
    keys, values = states(0, 1)
    keys[0, 1, 3] = bad
    pool.write(0, torch.tensor([9]), keys, values)
    found, _ = read(pool, 0, [9])
    assert not torch.isfinite(found[0, 1]).all()
    assert torch.isfinite(found[0, 0]).all()


@pytest.mark.parametrize("kind", ERRORS)
def test_whole_blocks_are_copied_in_all_layers_even_in_a_ring(kind: str) -> None:
    pool = make(kind)
    for block in (1, 2, 3):
        for layer in (0, 1):
            pool.write(layer, torch.arange(4 * block, 4 * block + 4), *states(10 * layer + block, 4))
    before = {(layer, b): read(pool, layer, list(range(4 * b, 4 * b + 4))) for layer in (0, 1) for b in (1, 2, 3)}
    pool.copy([1, 2, 3], [2, 3, 1])
    pool.copy([], [])
    for source, target in ((1, 2), (2, 3), (3, 1)):
        for layer in (0, 1):
            found = read(pool, layer, list(range(4 * target, 4 * target + 4)))
            assert all(torch.equal(a, b) for a, b in zip(found, before[layer, source], strict=True))


CAPACITY = 12


class Owners(RuleBasedStateMachine):
    """Any order of taking, sharing and releasing: nothing leaks, nothing belongs to two that do not share it."""

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(CAPACITY)
        self.owners: Counter[int] = Counter()

    @rule(target=held, count=st.integers(0, CAPACITY))
    def take(self, count: int) -> object:
        if count > self.blocks.free:
            with pytest.raises(ValueError, match="are free"):
                self.blocks.take(count)
            return multiple()
        taken = self.blocks.take(count)
        assert len(set(taken)) == count
        assert not any(self.owners[block] for block in taken)
        assert all(0 < block <= CAPACITY for block in taken)
        self.owners.update(taken)
        return tuple(taken)

    @rule(target=held, shared=held)
    def share(self, shared: tuple[int, ...]) -> object:
        if not all(self.owners[block] for block in shared):
            return multiple()
        self.blocks.share(shared)
        self.owners.update(shared)
        return shared

    @rule(released=held)
    def release(self, released: tuple[int, ...]) -> None:
        if all(self.owners[block] for block in released):
            self.blocks.release(released)
            self.owners.subtract(released)

    @invariant()
    def counts_agree(self) -> None:
        assert self.blocks.free == CAPACITY - sum(count > 0 for count in self.owners.values())


def test_a_free_block_can_be_neither_released_nor_shared() -> None:
    blocks = Blocks(3)
    taken = blocks.take(2)
    blocks.release(taken)
    for misuse in (blocks.release, blocks.share):
        with pytest.raises(ValueError, match="is not in use"):
            misuse(taken[:1])
    with pytest.raises(ValueError, match="wanted"):
        blocks.take(-1)


ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), max_size=8)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.lists(st.integers(0, 2), max_size=50), st.integers(0, 8))
def test_the_longest_whole_row_that_is_left_is_found(rows: list[list[int]], prompt: list[int], dropped: int) -> None:
    blocks = Blocks(64)
    kept = PrefixCache(blocks)
    for row in rows:
        kept.add(Prefix(tokens_T=np.array(row), blocks=blocks.take(1)))
    distinct = list(dict.fromkeys(map(tuple, rows)))
    assert len(kept) == len(distinct)
    assert blocks.free == 64 - len(distinct), "a row that is there already gives its blocks back"
    for _ in range(dropped):
        assert kept.drop_oldest() == bool(distinct)
        distinct = distinct[1:]
    found = kept.longest(np.array(prompt, dtype=np.int64))
    fitting = [row for row in distinct if tuple(prompt[: len(row)]) == row]
    assert (None if found is None else tuple(found.tokens_T)) == max(fitting, key=len, default=None)
    kept.keep_youngest(0)
    assert blocks.free == 64
    assert not kept.drop_oldest()
