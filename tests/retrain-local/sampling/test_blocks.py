from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule

from retrain_local.sampling.cache import Blocks

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


@given(st.lists(st.integers(1, 4), max_size=12))
def test_the_same_calls_give_the_same_blocks_and_untouched_ones_last(counts: list[int]) -> None:
    found = []
    for _ in range(2):
        blocks, taken = Blocks(64), []
        for count in counts:
            taken.append(blocks.take(count))
            blocks.release(taken[-1])
        found.append(taken)
        assert max((block for part in taken for block in part), default=0) <= max(counts, default=0)
    assert found[0] == found[1]
