"""Whole rows come back from what is stored around their action tokens."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.records.completions import RowRecord, row_arrays, rows_of

# one letter per token: prompt or environment, or sampled; the first token of a row is never sampled
SHAPES = st.lists(st.text("ea", max_size=12).map(lambda rest: "e" + rest), min_size=1, max_size=5)


def make(shape: str, first: int) -> RowRecord:
    action_T = np.array([letter == "a" for letter in shape])
    starts = (0, *(number for number in range(1, len(shape)) if shape[number - 1 : number + 1] == "ae"))
    return RowRecord(tokens_T=np.arange(first, first + len(shape)), action_T=action_T, starts=starts)


@given(SHAPES, st.integers(0, 2))
def test_rows_come_back(shapes: list[str], repeated: int) -> None:
    rows = [make(shape, 7) for shape in shapes] + [make(shapes[0], 7)] * repeated
    again = rows_of(row_arrays(rows), [row.tokens_T[row.action_T] for row in rows])
    for before, after in zip(rows, again, strict=True):
        np.testing.assert_array_equal(before.tokens_T, after.tokens_T)
        np.testing.assert_array_equal(before.action_T, after.action_T)
        assert before.starts == after.starts


def test_a_prompt_is_stored_once() -> None:
    arrays = row_arrays([make("eeeeaa", 3), make("eeeeaaaa", 3), make("eeeea", 4)])
    assert len(arrays["prompts"]) == 2 * 4
    assert arrays["prompt_of"].tolist() == [0, 0, 1]
    assert not len(arrays["environment"])


def test_arrays_that_do_not_fit_are_refused() -> None:
    row = make("eeaea", 0)
    arrays = row_arrays([row])
    with pytest.raises(ValueError, match="do not add up"):
        rows_of({**arrays, "prompt_lengths": arrays["prompt_lengths"] + 1}, [row.tokens_T[row.action_T]])
    with pytest.raises(ValueError, match="mask"):
        rows_of(arrays, [row.tokens_T])
