"""What launches depend on, without a kernel."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain_local.attention.pages import key_stretches

H100 = 8 * 132  # programs


@pytest.mark.parametrize(
    ("rows", "max_keys", "stretches"),
    [
        (1, 40_960, 32),
        (1, 64, 1),
        (128, 40_960, 1),
        (96, 40_960, 1),
        (64, 40_960, 2),
        (16, 40_960, 8),
        (4096, 40_960, 1),
    ],
)
def test_keys_are_cut_into_stretches_as_rows_get_few(rows: int, max_keys: int, stretches: int) -> None:
    """128 rows of 8 key heads miss the full device by 32 of 1,056 programs, which pays for no second launch."""
    assert key_stretches(H100, rows * 8, max_keys) == stretches


@given(programs=st.integers(1, 4096), heads=st.integers(1, 8192), max_keys=st.integers(0, 2**17))
def test_stretches_are_powers_of_two_near_what_fills_the_device(programs: int, heads: int, max_keys: int) -> None:
    found = key_stretches(programs, heads, max_keys)
    assert found & (found - 1) == 0
    assert 1 <= found <= 32
    assert found == 1 or (found * 64 < max_keys and found * heads <= programs * 2**0.5)
