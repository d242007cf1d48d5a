from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from retrain.testing import conformance
from tests.kit.shared import slow_or_long

PAGE = Path(__file__).parents[3] / "docs/pages/write-a-plugin.md"
Failures = Callable[..., dict[str, str]]
SOUND = (
    ("advantage", "over_the_step"),
    ("advantage", "centred"),
    ("transform", "spread"),
    ("uncertainty", "squared"),
    ("uncertainty", "NEEDS_THEM"),
    ("algorithm", "whole"),
    ("algorithm", "PAIR"),
    ("algorithm", "WHOLE"),
)
BROKEN = (
    ("advantage", "sorted_ones", "follows_the_order_of_completions", "in the order"),
    ("advantage", "less_and_less", "follows_the_order_of_groups", "when the groups of the step are reversed"),
    ("advantage", "one_group_short", "gives_one_finite_number_per_completion", "expected 1, one per group"),
    ("advantage", "centres_in_place", "leaves_rewards_alone", "has changed rewards"),
    ("advantage", "one_short", "gives_one_finite_number_per_completion", "has length 3, expected 4"),
    ("advantage", "divided_by_nothing", "gives_one_finite_number_per_completion", "nan at position 0"),
    ("advantage", "in_place", "leaves_rewards_alone", "has changed rewards"),
    ("advantage", "noisy", "repeats_its_advantages", "different numbers when called again"),
    ("advantage", "counting", "repeats_its_advantages", "different numbers when called again"),
    ("transform", "one_token_short", "gives_one_finite_number_per_token", "expected 6"),
    ("transform", "over_the_mean", "gives_one_finite_number_per_token", "must be finite"),
    ("transform", "writes_marks", "leaves_its_inputs_alone", "has changed the planning marks"),
    ("transform", "drifting", "credits_a_group_by_itself", "different credit by itself"),
    ("transform", "ASKS_NOBODY", "names_a_controller_that_exists", "'no_such_controller'"),
    ("transform", "RAISES", "gives_one_finite_number_per_token", "KeyError: 'missing'"),
    ("uncertainty", "negative", "measures_every_token", "must not be negative"),
    ("uncertainty", "needs_them_secretly", "declares_that_it_needs_entropies", "TypeError"),
    ("algorithm", "forgets_one", "gives_one_finite_number_per_token", "has 3 entries, expected 4"),
    ("algorithm", "NO_CONDITION", "names_its_condition", "has no label 'condition'"),
    ("algorithm", "NUMBER_LABEL", "names_its_condition", "its labels are"),
    ("algorithm", "FORGETFUL", "goes_on_after_a_resume", "credit and metrics from step 3 on"),
    ("algorithm", "MOVES_IN_ASSIGN", "repeats_its_credit", "different numbers when called again"),
    ("algorithm", "NOT_FINITE", "gives_one_finite_number_per_token", "must be finite"),
    ("algorithm", "ONE_SHORT", "gives_one_finite_number_per_token", "has length 5, expected 6"),
    ("algorithm", "TRAINS_NOTHING", "trains_informative_groups", "0 rows do not carry"),
    ("algorithm", "WRITES_LOGPROBS", "leaves_its_inputs_alone", "has changed logprobs_T"),
    ("algorithm", "RETURNS_ROWS", "gives_one_finite_number_per_token", "returned tuple, not Credit"),
    ("algorithm", "BROKEN_PAIR", "gives_one_finite_number_per_token", "'no_such_advantage'"),
)
QUICK = (BROKEN[0], BROKEN[10], BROKEN[15], BROKEN[18])  # one of each kind


@pytest.mark.parametrize(("kind", "part"), slow_or_long(SOUND, SOUND[0], SOUND[2], SOUND[3], SOUND[5]))
def test_sound_parts_pass(kind: str, part: str, failures: Failures) -> None:
    assert failures(kind, f"credit_parts.{part}") == {}


@pytest.mark.parametrize(("kind", "part", "check", "words"), slow_or_long(BROKEN, *QUICK))
def test_broken_parts_are_named(kind: str, part: str, check: str, words: str, failures: Failures) -> None:
    found = failures(kind, f"credit_parts.{part}")
    assert words in found[check]
    assert "fix: " in found[check]


@pytest.mark.long
def test_the_kernel_alone_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RETRAIN_PLUGINS", "retrain-core")
    for check in (*conformance("transform", "credit_parts.spread"), *conformance("reward", "reward_parts.Sound")):
        check()


def test_the_whole_algorithm_of_the_documentation_conforms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8")
    (block,) = [part for part in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "traits=Needs()" in part]
    (tmp_path / "running_mean_of_the_page.py").write_text(block, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    for check in conformance("algorithm", "running_mean_of_the_page.PLUGIN"):
        check()


@pytest.mark.long
def test_a_fault_fails_no_check_that_it_does_not_concern(failures: Failures) -> None:
    assert set(failures("advantage", "credit_parts.in_place")) == {"leaves_rewards_alone"}
    assert set(failures("transform", "credit_parts.ASKS_NOBODY")) == {"names_a_controller_that_exists"}
    assert set(failures("advantage", "credit_parts.sorted_ones")) == {"follows_the_order_of_completions"}
