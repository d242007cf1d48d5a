"""Elapsed times as every table, page and log line shows them."""

from __future__ import annotations

import pytest

from retrain.text.amounts import ABSENT, duration


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        *(
            (0.0, "0 ms"),
            (0.000012, "0.012 ms"),
            (0.0003, "0.3 ms"),
            (0.25, "250 ms"),
            (0.421, "420 ms"),
            (1.0, "1.0 s"),
        ),
        *((12.4, "12 s"), (59.4, "59 s"), (59.6, "0:01:00"), (75.3, "0:01:15"), (3723, "1:02:03")),
        *((300_000, "3 days, 11:20:00"), (None, ABSENT), (float("nan"), ABSENT), (float("inf"), ABSENT)),
    ],
)
def test_a_duration_reads_at_a_glance(seconds: float | None, shown: str) -> None:
    assert duration(seconds) == shown
