"""Verdicts are remembered by question, failures are not."""

from __future__ import annotations

from retrain.kernel.types import Example, Score
from retrain.tasks.scoring.service import VerdictCache, key_of


def test_equal_questions_share_a_key_and_no_others() -> None:
    example, other = (Example(id=name, prompt="p", reference="r") for name in "ab")
    again = Example(id="a", prompt="p", reference="r")
    assert key_of(0, example, "x") == key_of(0, again, "x")
    keys = {key_of(0, example, "x"), key_of(1, example, "x"), key_of(0, other, "x"), key_of(0, example, "\ud800")}
    assert len(keys) == 4


def test_failures_are_not_kept_and_the_oldest_goes_first() -> None:
    cache = VerdictCache(max_entries=2)
    example = Example(id="a", prompt="p", reference="r")
    one, two, three, four = (key_of(0, example, text) for text in "1234")
    cache.put(one, Score.of(1.0))
    cache.put(two, Score.no_verdict("n"))
    cache.put(three, Score.failed("f"))
    assert cache.get(three) is None
    assert cache.get(one) == Score.of(1.0)  # used: now two is the oldest
    cache.put(four, Score.of(0.0))
    assert [cache.get(key) for key in (one, two, four)] == [Score.of(1.0), None, Score.of(0.0)]
