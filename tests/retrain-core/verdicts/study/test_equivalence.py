"""`practically the same`: a planned margin, and an interval that lies inside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from retrain.campaign.load import PlanTable, seal_plan
from retrain.records.runs.curves import Direction
from retrain.verdicts.stats.flip import FlipTest
from retrain.verdicts.study.comparison import Comparison, Verdict, VerdictReason
from retrain.verdicts.study.judge import judge, with_margin
from tests.kit.pairings import pairing

SMALL = [0.01, -0.01, 0.005, 0.0075, -0.005, 0.002, -0.0075, -0.002]


def judged(*diffs: Any, margin: float | None = 0.02, direction: Direction = Direction.HIGHER) -> tuple[Comparison, ...]:
    pairings = [pairing(each) for each in diffs]
    return with_margin(judge(pairings, alpha=0.05, direction=direction), pairings, margin)


def test_inside_the_margin_is_the_same_and_outside_or_without_one_is_open() -> None:
    (same,), (open_one,), (without,) = judged(SMALL), judged(SMALL, margin=0.004), judged(SMALL, margin=None)
    assert (same.verdict, same.cause, same.margin) == (Verdict.PRACTICALLY_SAME, VerdictReason.WITHIN, 0.02)
    assert open_one.verdict is Verdict.CANNOT_TELL
    assert (without.verdict, without.margin) == (Verdict.CANNOT_TELL, None)
    (at_it,), (barely,) = judged([0.02] * 8), judged([0.02 - 1e-9] * 8)
    assert (at_it.verdict, barely.verdict) == (Verdict.BETTER, Verdict.PRACTICALLY_SAME)


@pytest.mark.parametrize("direction", Direction)
def test_a_difference_that_is_found_and_too_small_to_matter_is_the_same(direction: Direction) -> None:
    (found,) = judged([0.010, 0.011, 0.012, 0.009, 0.010, 0.011, 0.012, 0.009], direction=direction)
    assert (found.verdict, found.cause) == (Verdict.PRACTICALLY_SAME, VerdictReason.FOUND_WITHIN)
    (large,) = judged([0.1 + each for each in SMALL], direction=direction)
    assert large.verdict is (Verdict.BETTER if direction is Direction.HIGHER else Verdict.WORSE)


@pytest.mark.parametrize("num_seeds", [0, 1, 2, 5])
def test_too_few_seeds_are_never_the_same(num_seeds: int) -> None:
    """Not even when every difference is zero: the interval has no limit."""
    (found,) = judged([0.0] * num_seeds, margin=1e9)
    assert found.verdict is Verdict.CANNOT_TELL


def test_the_whole_family_sets_the_level() -> None:
    """At the last step of Holm's correction stands the smallest difference, with an interval at 95 %: too narrow."""
    clear = [0.5 + each for each in SMALL]
    *_, last = judged(clear, clear, clear, SMALL)
    assert last.level == 1 - 0.05 / 4
    assert last.interval == FlipTest.of(np.array(SMALL)).interval(1 - 0.05 / 4)
    assert last.verdict is Verdict.PRACTICALLY_SAME
    low, high = FlipTest.of(np.array(SMALL)).interval(0.95)
    between = (max(-low, high) + max(-last.interval[0], last.interval[1])) / 2
    *_, last = judged(clear, clear, clear, SMALL, margin=between)
    assert last.verdict is Verdict.CANNOT_TELL
    assert max(abs(limit) for limit in last.interval or ()) > between  # so the page does not contradict itself


def test_a_plan_with_a_margin_decides_on_disk(made: Any, tmp_path: Path, compare_json: Callable[..., Any]) -> None:
    table = PlanTable(hypothesis="no harm", margin=0.5)
    labels = ["grpo+none", "maxrl+none"]
    plan = seal_plan(table, conditions=labels, seeds=range(8), max_steps=20, written=made.WRITTEN)
    folder = made.write_campaign(tmp_path, dict.fromkeys(labels, 0.0), seeds=range(8), steps=20, plan=plan)
    content = compare_json(folder)
    (found,) = content["comparisons"]
    assert (found["verdict"], found["margin"], content["plan"]["margin"]) == ("practically the same", 0.5, 0.5)
    assert "practically the same" in found["line"]
    assert "±50.0 pp" in found["explanation"]
    (other,) = compare_json(folder, "--metric", "correct_rate")["comparisons"]
    assert other["margin"] is None  # the margin is of the planned metric


def test_the_margin_is_positive_finite_and_sealed_and_an_absent_one_leaves_old_seals_unchanged() -> None:
    def sealed(**keys: Any) -> dict[str, Any]:
        table = PlanTable(hypothesis="h", **keys)
        return seal_plan(table, conditions=["a"], seeds=[1], max_steps=1, written="2026-03-01T12:00:00+00:00")

    assert "margin" not in sealed()
    assert sealed(margin=0.02)["sha256"] != sealed(margin=0.03)["sha256"] != sealed()["sha256"]
    for margin in (0.0, -0.1, float("inf"), float("nan")):
        with pytest.raises(ValidationError):
            sealed(margin=margin)
