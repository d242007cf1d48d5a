from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain_local.sampling.cache import Blocks, Prefix, PrefixCache

ROWS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=40), max_size=8)


@settings(max_examples=40, deadline=None)
@given(ROWS, st.lists(st.integers(0, 2), max_size=50), st.integers(0, 8))
def test_the_longest_whole_row_is_found_among_those_that_are_left(
    rows: list[list[int]], prompt: list[int], dropped: int
) -> None:
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
