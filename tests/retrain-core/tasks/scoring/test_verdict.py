"""Three outcomes that are never merged, of one reward and of several."""

from __future__ import annotations

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.types import Outcome, Score
from retrain.tasks.scoring.failures import next_step
from retrain.tasks.scoring.verdict import combined, verdict


def test_a_number_is_a_score() -> None:
    of_numpy = (np.float32(1.0), np.int64(1), np.bool_(True), np.array(1.0))
    for answer in (1, 1.0, True, *of_numpy, Fraction(1), Decimal(1)):
        score = verdict(answer)
        assert (score.outcome, score.value, type(score.value)) == (Outcome.SCORED, 1.0, float)


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (float("nan"), "finite number"),
        (float("-inf"), "finite number"),
        (np.float32("nan"), "finite number"),
        (None, "returned None, not a number"),
        ("1.0", "returned str '1.0', not a number"),
        (b"1", "returned bytes"),
        (1j, "returned complex"),
        ([1.0, 0.0], "returned list"),
        (np.ones(1), "returned ndarray"),
        (10**400, "OverflowError"),
        (Score(outcome=Outcome.SCORED), "Score without a value"),
        (Score(outcome=Outcome.SCORED, value=float("nan")), "finite number"),
        (Score(outcome=Outcome.SCORED, value="1"), "returned str '1'"),  # type: ignore[arg-type]
        (Score(outcome=Outcome.SCORED, value=1.0, parts={"a": float("nan")}), "parts that are not finite"),
        (Score(outcome=Outcome.SCORED, value=1.0, parts={"a": "b"}), "ValueError"),  # type: ignore[dict-item]
        (Score(outcome="perfect", value=1.0), "ValueError"),  # type: ignore[arg-type]
    ],
)
def test_anything_else_is_a_failure(answer: Any, detail: str) -> None:
    score = verdict(answer)
    assert (score.outcome, score.value) == (Outcome.FAILED, None)
    assert detail in score.detail


@pytest.mark.parametrize(
    ("detail", "step"),
    [
        (verdict(None).detail, "Score.no_verdict(reason)"),
        (verdict(float("nan")).detail, "division by zero"),
        (verdict(float("-inf")).detail, "division by zero"),
        (verdict("1").detail, "return a number"),
        ("timed out after 0.3 s", "[scoring.limits.mine] timeout_s"),
        ("comparing took longer than 8 s", "[scoring.limits.mine] timeout_s"),
        ("RewardError: example e has an empty reference: nothing can equal it", "give that example a reference"),
        ("the reference '1/0' has no value, and its text differs", "rewrite the reference"),
        ("KeyError: 'x'", ""),
    ],
)
def test_each_cause_has_its_next_step(detail: str, step: str) -> None:
    found = next_step(detail, "mine")
    assert step in found
    assert bool(found) == bool(step)


def test_one_reward_stays_as_it_is_but_for_its_weight() -> None:
    own = Score(outcome=Outcome.SCORED, value=0.5, detail="d", parts={"a": 1.0})
    assert combined([own], ["math"], [1.0]) is own
    assert combined([own], ["math"], [2.0]) == Score(outcome=Outcome.SCORED, value=1.0, detail="d", parts={"a": 1.0})
    assert combined([Score.failed("f")], ["math"], [2.0]) == Score.failed("f")
    assert verdict(Score.no_verdict("x" * 10**6)) == Score.no_verdict("x" * 1000), "a long detail is cut"


def test_several_rewards_are_a_weighted_sum_with_parts() -> None:
    scores = [Score.of(1.0), Score(outcome=Outcome.SCORED, value=0.5, detail="so so")]
    whole = combined(scores, ["math", "style"], [1.0, -0.5])
    assert (whole.value, whole.detail, whole.parts) == (0.75, "style: so so", {"math": 1.0, "style": 0.5})
    assert combined([Score.of(1e308)], ["a"], [100.0]).outcome is Outcome.FAILED, "the sum overflows"
    assert combined([Score.of(1e308)] * 2, ["a", "b"], [1.0, 1.0]).outcome is Outcome.FAILED


def test_a_failed_part_outweighs_one_without_a_verdict() -> None:
    names, weights = ["a", "b", "c"], [1.0, 1.0, 1.0]
    whole = combined([Score.no_verdict("n"), Score.failed("f"), Score.of(1.0)], names, weights)
    assert (whole.outcome, whole.detail, whole.parts) == (Outcome.FAILED, "b: f", {"c": 1.0})
    whole = combined([Score.no_verdict("n"), Score.of(0.0), Score.of(1.0)], names, weights)
    assert (whole.outcome, whole.detail, whole.parts) == (Outcome.NO_VERDICT, "a: n", {"b": 0.0, "c": 1.0})


SCORES = st.one_of(
    st.floats(-1e6, 1e6).map(Score.of), st.just(Score.failed("broken")), st.just(Score.no_verdict("cannot tell"))
)


@settings(max_examples=40)
@given(st.lists(st.tuples(SCORES, st.floats(-10, 10)), min_size=1, max_size=5))
def test_the_whole_has_exactly_one_outcome(parts: list[tuple[Score, float]]) -> None:
    scores, weights = zip(*parts, strict=True)
    whole = combined(scores, [f"r{n}" for n in range(len(scores))], weights)
    outcomes = {score.outcome for score in scores}
    worst = next(o for o in (Outcome.FAILED, Outcome.NO_VERDICT, Outcome.SCORED) if o in outcomes)
    assert whole.outcome is worst
    assert (whole.value is not None) == (worst is Outcome.SCORED)
