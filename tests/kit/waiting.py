"""Waits for a condition."""

import time
from collections.abc import Callable


def wait_until(condition: Callable[[], object], limit_s: float = 120.0) -> None:
    """AssertionError when the condition does not hold within so long."""
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.01)
