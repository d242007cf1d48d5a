"""A curve in one line: as many characters as fit, heights in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from retrain.text.terminal_text import BLOCKS, sparkline


def test_every_height_has_its_block() -> None:
    assert sparkline([i / 8 for i in range(8)]) == BLOCKS
    assert sparkline([]) == ""


@given(values=st.lists(st.floats(-2, 3), max_size=500), width=st.integers(1, 80))
def test_any_curve_fits_the_width(values: list[float], width: int) -> None:
    line = sparkline(values, width)
    assert len(line) <= min(width, len(values))
    assert set(line) <= set(BLOCKS)
