"""The time limit of one score interrupts Python code, wherever the alarm finds it."""

from __future__ import annotations

import signal
import time

import pytest

from retrain_rewards.verifiers.math_reward import TimeUp, time_limit


class Slow:
    """Takes half the limit to go away."""

    def __del__(self) -> None:
        end = time.monotonic() + 0.15
        while time.monotonic() < end:
            pass


def test_an_alarm_in_a_destructor_interrupts_what_comes_after_it() -> None:
    """Python prints what a destructor raises and goes on, so raising there would be noise and no limit."""
    with pytest.raises(TimeUp), time_limit(0.05):  # noqa: PT012 -- the alarm comes twice
        Slow().__del__()
        while True:
            pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


def test_a_time_limit_is_not_swallowed_and_leaves_nothing_behind() -> None:
    before = signal.getsignal(signal.SIGALRM)

    def stubborn() -> None:
        for _ in range(3):
            try:
                while True:
                    pass
            except Exception:
                continue

    with pytest.raises(TimeUp), time_limit(0.05):
        stubborn()
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
    with time_limit(60.0):
        pass
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
