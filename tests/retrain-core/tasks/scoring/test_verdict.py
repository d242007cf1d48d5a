"""Three outcomes that are never merged, of one reward and of several; failures are kept whole, once, within a limit."""

from __future__ import annotations

import json
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.scoring import failures
from retrain.tasks.scoring.failures import FailureRecord, next_step, read_failures, write_failures
from retrain.tasks.scoring.verdict import combined, verdict
from tests.kit.problems import codes_in


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
    names, weights = ["a", "b", "c"], [1.0, 1.0, 1.0]
    whole = combined([Score.no_verdict("n"), Score.failed("f"), Score.of(1.0)], names, weights)
    assert (whole.outcome, whole.detail, whole.parts) == (Outcome.FAILED, "b: f", {"c": 1.0})
    whole = combined([Score.no_verdict("n"), Score.of(0.0), Score.of(1.0)], names, weights)
    assert (whole.outcome, whole.detail, whole.parts) == (Outcome.NO_VERDICT, "a: n", {"b": 0.0, "c": 1.0})
    assert combined([Score.of(1e308)], ["a"], [100.0]).outcome is Outcome.FAILED, "the sum overflows"
    assert combined([Score.of(1e308)] * 2, ["a", "b"], [1.0, 1.0]).outcome is Outcome.FAILED


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


def record(text: str = "x", **more: Any) -> FailureRecord:
    example = Example(id="e", prompt=[{"role": "user", "content": "p"}], reference="7", **more)
    return FailureRecord(
        reward="math", weight=1.0, example=example, text=text, detail="d", attempts=2, seconds=0.1, report="r"
    )


@pytest.mark.parametrize("text", ["", "\ud800\0\x1b[2J", "x" * 1_000_000, "漢字"])
def test_a_record_comes_back_as_it_was(text: str, tmp_path: Path) -> None:
    own = record(text, task="t", info={"a": [1, (2,)], "b": {3: float("inf")}})
    assert write_failures(tmp_path / "failures", "step_1", [own])
    (file, back) = read_failures(tmp_path / "failures" / "step_1_0.json")[0]
    assert json.loads(file.read_bytes())["reward"] == "math"
    assert (back.text, back.example.info, back.example.prompt) == (text, own.example.info, own.example.prompt)
    assert (back.reward, back.detail, back.attempts, back.report) == ("math", "d", 2, "r")
    write_failures(tmp_path, "s", [record(info={"a": {1}, "b": 2})])
    assert read_failures(tmp_path)[0][1].example.info == {"a": "{1}", "b": 2}, "what cannot be sent is kept as text"


def test_a_step_that_is_tried_again_replaces_its_own(tmp_path: Path) -> None:
    write_failures(tmp_path, "step_1", [record("a"), record("b"), record("c")])
    write_failures(tmp_path, "step_10", [record("d")])
    write_failures(tmp_path, "step_1", [record("e")])
    assert [(file.name, each.text) for file, each in read_failures(tmp_path)] == [
        ("step_1_0.json", "e"),
        ("step_10_0.json", "d"),
    ]
    write_failures(tmp_path, "step_1", [])
    assert [file.name for file, _ in read_failures(tmp_path)] == ["step_10_0.json"]


def test_a_full_folder_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(failures, "MAX_FILES", 3)
    assert write_failures(tmp_path, "a", [record()] * 2)
    assert not write_failures(tmp_path, "b", [record()] * 2)
    assert not write_failures(tmp_path, "c", [record()])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a_0.json", "a_1.json", "b_0.json"]
    folder = tmp_path / "failures"
    write_failures(folder, "s", [])
    assert not folder.exists()
    write_failures(folder, "../../x", [record()])
    assert [file.name for file in folder.iterdir()] == [".._.._x_0.json"], "a label is only a name"
    assert write_failures(folder / ".._.._x_0.json", "s", [record()]), "a disk that refuses stops nothing"
    assert "cannot be kept" in caplog.text


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"reward": "r"}', "\x00", '{"example": 3}', "[" * 100_000])
def test_what_is_no_record_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(content)
    (tmp_path / "empty").mkdir()
    places = {"": "replay.unreadable", "empty": "replay.empty-folder", "nowhere": "replay.missing"}
    for place, code in places.items():
        with pytest.raises(ConfigError) as caught:
            read_failures(tmp_path / place)
        assert codes_in(caught) == [code]
        assert (place or "a.json") in caught.value.problems[0].where
