"""Blocks at the beginning of neighbouring rows, which a kernel reads once for all of them."""

from __future__ import annotations

import numpy as np
import pytest

from retrain_local.attention.pages import shared_prefixes

CASES = {
    "two groups": ([[1, 2, 3], [1, 2, 4], [1, 2, 5], [6, 7, 8], [6, 9, 0]], [2, 2, 2, 1, 1], [3, 0, 0, 2, 0]),
    "no group": ([[1, 2], [3, 4], [5, 0]], [0, 0, 0], [0, 0, 0]),
    "scratch blocks of empty rows": ([[1, 2], [0, 0], [0, 0]], [0, 0, 0], [0, 0, 0]),
    "no neighbours": ([[1, 2], [3, 4], [1, 5]], [0, 0, 0], [0, 0, 0]),
    "more rows than fit": ([[1, at] for at in range(2, 7)], [1] * 5, [3, 0, 0, 2, 0]),
    "one more than fits": ([[1, at] for at in range(2, 6)], [1, 1, 1, 0], [3, 0, 0, 0]),
    "a longer prefix of some": ([[1, 2, 3], [1, 2, 4], [1, 5, 6], [1, 5, 7]], [2, 2, 2, 2], [2, 0, 2, 0]),
    "one row": ([[1, 2]], [0], [0]),
}


@pytest.mark.parametrize(("tables", "blocks", "rows"), CASES.values(), ids=CASES)
def test_neighbours_share_the_blocks_that_their_tables_begin_with(
    tables: list[list[int]], blocks: list[int], rows: list[int]
) -> None:
    found = shared_prefixes(np.array(tables, dtype=np.int32), 3)
    assert [each.tolist() for each in found] == [blocks, rows]
