from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain_rewards.sources.arithmetic import count_pairs, pair, shares
from tests.kit.problems import refused

Load = Callable[..., Any]
QUESTION = re.compile(r"What is (\d+) ([+*-]) (\d+)\?")


def test_the_home_task(load: Load) -> None:
    loaded = load("arithmetic")
    assert len(loaded.examples) == 4000
    assert len({e.id for e in loaded.examples}) == 4000
    signs = Counter()
    for example in loaded.examples:
        match = QUESTION.fullmatch(example.prompt)
        assert match
        left, sign, right = int(match[1]), match[2], int(match[3])
        signs[sign] += 1
        assert example.reference == str({"+": left + right, "-": left - right, "*": left * right}[sign])
        assert max(left, right) < 100
        if sign == "*":
            low, high = sorted((left, right))
            assert 1 <= low <= 9
            assert 10 <= high <= 99
    assert max(signs.values()) - min(signs.values()) <= 1
    assert loaded.reward is None
    first, again, other = (load("arithmetic", options={"size": 300, "seed": seed}) for seed in (3, 3, 4))
    assert [e.id for e in first.examples] == [e.id for e in again.examples] != [e.id for e in other.examples]
    (example,) = load("arithmetic", options={"size": 1, "operations": ["+"]}).examples
    assert (example.prompt, example.reference) == ("What is 95 + 25?", "120")
    assert example.id == "arithmetic-fda1d51f9cd2f39d83d09a73", "ids are fixed for all time"
    assert Counter(QUESTION.fullmatch(e.prompt)[2] for e in loaded.examples[:300]) == {"+": 100, "-": 100, "*": 100}


def test_a_range_of_operands_holds_for_every_operation(load: Load) -> None:
    loaded = load("arithmetic", options={"size": 27, "operands": [7, 9]})
    problems = {QUESTION.fullmatch(example.prompt).groups() for example in loaded.examples}
    assert problems == {(left, sign, right) for left in "789" for sign in "+-*" for right in "789"}
    too_many = {"size": 10, "operands": [7, 9], "operations": ["+"]}, {"size": 282, "digits": 1}
    assert [refused(load, "arithmetic", options=options) for options in too_many] == [["data.size-too-large"]] * 2
    assert len({e.prompt for e in load("arithmetic", options={"size": 281, "digits": 1}).examples}) == 281
    assert refused(load, "arithmetic", path="tasks.jsonl", answer_key="solution") == ["data.unread-key"] * 2
    for digits, operations in ((1, "*,-"), (3, "+"), (6, ["+", "+"]), (6, "*")):
        loaded = load("arithmetic", options={"size": 80, "digits": digits, "operations": operations})
        assert len({example.prompt for example in loaded.examples}) == 80


@pytest.mark.parametrize(
    "options",
    [
        *({"size": 0}, {"sise": 5}, {"operations": ["/"]}, {"operations": []}, {"digits": 7}, {"seed": -1}),
        *({"size": "5"}, {"operands": [2]}, {"operands": [3, 2]}, {"operands": [-1, 2]}, {"operands": [0, 10**6]}),
        {"operands": [2, 12], "digits": 2},
    ],
)
def test_bad_options_are_refused(load: Load, options: dict[str, object]) -> None:
    with pytest.raises(AssertionError, match="Problem"):
        load("arithmetic", options=options)


@given(st.sampled_from("+-*"), st.integers(1, 2))
def test_pairs_are_distinct(sign: str, digits: int) -> None:
    count = count_pairs(sign, digits)
    assert len({pair(sign, index, digits) for index in range(count)}) == count


@given(st.dictionaries(st.sampled_from("+-*"), st.integers(1, 50), min_size=1), st.data())
def test_shares_use_what_there_is(counts: dict[str, int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, sum(counts.values())))
    taken = shares(size, counts)
    assert sum(taken.values()) == size
    open_shares = [taken[sign] for sign in counts if taken[sign] < counts[sign]]
    assert all(taken[sign] <= counts[sign] for sign in counts)
    assert not open_shares or max(taken.values()) - min(open_shares) <= 1
