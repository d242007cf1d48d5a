"""What is read from `eval.jsonl`: the lines of one step and set, found without parsing the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.records.runs.curves import Metric, Summary
from retrain.records.runs.example_rates import (
    ExampleRates,
    NoExamplesError,
    PerExample,
    aligned,
    per_example,
    read_rates,
)

RATE = PerExample(name="held_out", kind="correct_rate", k=0)


def _line(step: int, named: str, marks: list[bool], *, name: str = "held_out", **more: Any) -> str:
    scores = [float(each) for each in marks]
    record = {"step": step, "set": name, "example": named, "cluster": named, "scores": scores, "correct": marks}
    return json.dumps(record | more) + "\n"


def _write(folder: Path, *lines: str) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "eval.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@settings(max_examples=30)
@given(
    counts=st.dictionaries(st.integers(-1, 40), st.integers(1, 5), max_size=12),
    step=st.integers(-1, 41),
    pad=st.integers(0, 300),
)
def test_the_lines_of_a_step_are_found_wherever_they_are(
    tmp_path_factory: pytest.TempPathFactory, counts: dict[int, int], step: int, pad: int
) -> None:
    lines = [
        _line(at, f"{at}-{index}", [index % 2 == 0], extra="x" * (pad * (index % 3)))
        for at in sorted(counts)
        for index in range(counts[at])
    ]
    folder = _write(tmp_path_factory.mktemp("run") / "run", *lines)
    if step not in counts:
        with pytest.raises(NoExamplesError, match=f"nothing about step {step}"):
            read_rates(folder, RATE, step=step, expected=0.0)
        return
    expected = float(np.mean([index % 2 == 0 for index in range(counts[step])]))
    found = read_rates(folder, RATE, step=step, expected=expected)
    assert found.ids == tuple(f"{step}-{index}" for index in range(counts[step]))
    assert found.values_E.mean() == expected


def test_a_set_is_kept_apart_and_each_figure_is_that_of_the_metric(tmp_path: Path) -> None:
    lines = (
        _line(3, "a", [True, False, False, False]),
        _line(3, "b", [True, True, False, True]),
        _line(3, "a", [True], name="hard"),
    )
    folder = _write(tmp_path / "run", *lines)
    for field, values in {
        "eval_correct_rate": [0.25, 0.75],
        "eval_mean_reward": [0.25, 0.75],
        "eval_pass_at_2": [0.5, 1.0],
        "eval_hard_correct_rate": [1.0],
    }.items():
        found = read_rates(folder, per_example(Metric(field)), step=3, expected=float(np.mean(values)))
        assert found.values_E.tolist() == values
        assert found.lines == 3


@pytest.mark.parametrize("metric", ["correct_rate", "eval_time_s", "eval_correct_rate:best", "eval_correct_rate:auc"])
def test_a_metric_without_one_evaluation_has_no_examples(metric: str) -> None:
    field, _, summary = metric.partition(":")
    with pytest.raises(NoExamplesError, match="evaluation: only" if summary else "not a mean over held-out examples"):
        per_example(Metric(field, Summary(summary or "final")))


DAMAGED = {"no list `correct`": [_line(3, "a", [True], correct=each) for each in (["yes"], [])]}
DAMAGED |= {"cannot be read": [_line(3, "a", [True]) + "{broken\n"], "no text": [_line(3, "a", [True], example=7)]}
DAMAGED |= {"gives 0 at step 3, metrics.jsonl 1": [_line(3, "a", [False])]}


@pytest.mark.parametrize("why", DAMAGED)
def test_a_damaged_or_foreign_file_is_named(tmp_path: Path, why: str) -> None:
    for text in DAMAGED[why]:
        with pytest.raises(NoExamplesError, match=why):
            read_rates(_write(tmp_path / "run", text), RATE, step=3, expected=1.0)


def test_no_file_and_a_line_cut_short(tmp_path: Path) -> None:
    with pytest.raises(NoExamplesError, match=r"run has no eval\.jsonl"):
        read_rates(tmp_path / "run", RATE, step=3, expected=1.0)
    folder = _write(tmp_path / "run", _line(3, "a", [True]), _line(3, "b", [False])[:-20])
    assert read_rates(folder, RATE, step=3, expected=1.0).ids == ("a",)


def _rates(ids: str, values: list[float], clusters: str = "") -> ExampleRates:
    return ExampleRates(ids=tuple(ids), clusters=tuple(clusters or ids), values_E=np.array(values), lines=len(ids))


def test_examples_are_matched_by_id() -> None:
    rows = aligned([("x", _rates("abc", [1, 2, 3])), ("y", _rates("cab", [6, 4, 5]))])
    assert rows.tolist() == [[1, 2, 3], [4, 5, 6]]
    twice = aligned([("x", _rates("aab", [1, 2, 3])), ("y", _rates("aab", [4, 5, 6]))])
    assert twice.tolist() == [[1, 2, 3], [4, 5, 6]]


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (_rates("abd", [1, 2, 3]), "3 examples and x on 3, 2 of them the same"),
        (_rates("ab", [1, 2]), "2 examples and x on 3"),
        (_rates("aabc", [1, 2, 3, 4]), "4 examples and x on 3"),
        (_rates("abc", [1, 2, 3], "ppq"), "other clusters"),
    ],
)
def test_what_does_not_match_is_refused(other: ExampleRates, why: str) -> None:
    with pytest.raises(NoExamplesError, match=why):
        aligned([("x", _rates("abc", [1, 2, 3])), ("y", other)])
