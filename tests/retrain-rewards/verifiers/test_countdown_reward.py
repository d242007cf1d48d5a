"""The verifier of the number puzzles: right expressions score, and what only looks like one does not."""

from __future__ import annotations

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.api import Example
from retrain_rewards.verifiers.countdown import CountdownReward, evaluated, question, solution
from tests.kit.tables import cells

PUZZLE = Example(id="e", prompt=question([44, 19, 35], 98), reference="", info={"nums": [44, 19, 35], "target": 98})
RIGHT = [
    r"\boxed{44 + 19 + 35}",
    r"\boxed{(19+44)+35 = 98}",
    r"\boxed{35 - (-44 - 19)}",
    r"so \boxed{44 \times 1} no, \boxed{\left(44 + 35\right) + 19}",
]
# What a policy finds that wants the reward and not the solution.
GREEDY = cells(r"""
    98  \boxed{98}  \boxed{98 = 98}  \boxed{44 + 19 + 35 + 0}  \boxed{44 + 19 + 35 - 1 + 1}  \boxed{44 + 54}
    \boxed{4 + 4 + 1 + 9 + 35 + 45}  \boxed{44 + 44 + 10}  \boxed{44 + 19}  \boxed{4419 + 35 - 4356}
    \boxed{44 + 1935}  \boxed{44 + 19 + 35 = 98 = 44 + 19 + 35}  \boxed{44 + 19 + 35 or 98}
    \boxed{44 + 19 + 35 == 98}  \boxed{[44, 19, 35] and 98}
    \boxed{__import__('os').system('true') or 44 + 19 + 35}  \boxed{44 + 19 + 35 # 98}
    \boxed{44 + 19 + 35 if 1 else 0}  \boxed{044 + 19 + 35}  \boxed{44.0 + 19 + 35}
    \boxed{44 + 19 + 35; 98}  \boxed{44 + 19 + 35, 98}  \boxed{４４ + 19 + 35}  \boxed{}  44 + 19 + 35
""")
HUGE = [
    "9**9**9**9",
    "44**19**35",
    "(" * 5000 + "1" + ")" * 5000,
    "9" * 5000,
    "-" * 5000 + "1",
    "1/0",
    "1//1",
    "9*" * 90,
]


@pytest.mark.parametrize("text", RIGHT)
def test_a_solution_scores(text: str) -> None:
    assert CountdownReward().score(PUZZLE, text).value == 1.0


@pytest.mark.parametrize("text", GREEDY)
def test_what_is_no_solution_does_not(text: str) -> None:
    assert CountdownReward().score(PUZZLE, text).value == 0.0


def test_nothing_huge_is_computed() -> None:
    started = time.process_time()
    assert [evaluated(text) for text in HUGE] == [None] * len(HUGE)
    assert time.process_time() - started < 5.0  # 9**9**9 would take longer than the universe has


def test_division_is_exact() -> None:
    puzzle = Example(id="e", prompt="", reference="", info={"nums": [3, 3, 8, 8], "target": 24})
    assert CountdownReward().score(puzzle, r"\boxed{8 / (3 - 8 / 3)}").value == 1.0
    assert evaluated("1 / 3") == (Fraction(1, 3), [1, 3])


@given(st.lists(st.integers(1, 100), min_size=3, max_size=4), st.lists(st.sampled_from("+-*"), min_size=3, max_size=3))
def test_gold_solves_what_can_be_solved(numbers: list[int], signs: list[str]) -> None:
    text = str(numbers[0]) + "".join(f" {sign} {number}" for sign, number in zip(signs, numbers[1:], strict=False))
    made = evaluated(text)
    assert made is not None
    puzzle = Example(id="e", prompt="", reference="", info={"nums": numbers, "target": int(made[0])})
    gold = CountdownReward().gold(puzzle)
    assert gold is not None
    assert CountdownReward().score(puzzle, gold).value == 1.0


def test_without_a_solution_there_is_no_gold() -> None:
    assert solution([1, 1], 50) == ""
    assert CountdownReward().gold(Example(id="e", prompt="", reference="", info={"nums": [1, 1], "target": 50})) is None
