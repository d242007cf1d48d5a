"""`metrics.jsonl` as columns: what is read of a long file, what of a damaged one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.report.gather import Episode, RunLines, read_lines

FIELDS = ("loss", "correct_rate")


def line(step: int, **fields: Any) -> str:
    return json.dumps({"step": step} | fields)


def read(folder: Path, *lines: str, stride: int = 1, end: str = "\n") -> RunLines:
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(lines) + end, encoding="utf-8")
    return read_lines(file, FIELDS, stride=stride)


def test_every_line_and_only_numbers(tmp_path: Path) -> None:
    rows = [line(-1, eval_pass_at_2=0.5, eval_correct_rate=0.4), line(0, loss=None, correct_rate=0.5)]
    rows += [line(1, loss=0.25, correct_rate=True), line(2, loss="a", correct_rate=1e300), '{"step": 3, "loss": NaN}']
    found = read(tmp_path, *rows)
    assert found.steps_R.tolist() == [-1, 0, 1, 2, 3]
    np.testing.assert_array_equal(found.column("loss"), [np.nan, np.nan, 0.25, np.nan, np.nan])
    np.testing.assert_array_equal(found.column("correct_rate"), [np.nan, 0.5, np.nan, np.nan, np.nan])
    np.testing.assert_array_equal(found.column("eval_pass_at_2"), [0.5, np.nan, np.nan, np.nan, np.nan])
    assert np.isnan(found.column("never")).all()
    assert found.mean("loss") == 0.25
    assert found.mean("never") is None
    assert not found.problem


def test_of_long_files_one_step_in_stride_and_all_that_is_rare(tmp_path: Path) -> None:
    rows = [line(step, loss=float(step)) for step in range(100)]
    rows[33] = line(33, loss=33.0, eval_correct_rate=0.5)
    rows[57] = line(57, loss=57.0, health=["truncation"])
    found = read(tmp_path, *rows, stride=10)
    assert found.steps_R.tolist() == sorted([*range(0, 100, 10), 33, 57, 99])
    assert found.column("loss").tolist() == found.steps_R.tolist()


def test_health_episodes_from_their_first_step_to_their_last(tmp_path: Path) -> None:
    health = {3: ["a"], 4: ["a", "b"], 5: ["b"], 8: ["a"], 19: ["c"]}
    rows = [line(step, **({"health": health[step]} if step in health else {})) for step in range(20)]
    for stride in (1, 7):
        found = read(tmp_path, *rows, stride=stride).episodes
        spans = [(each.state, each.first_step, each.last_step) for each in found]
        assert sorted(spans) == [("a", 3, 4), ("a", 8, 8), ("b", 4, 5), ("c", 19, 19)]


def test_a_line_cut_by_a_kill_is_left_out_and_damage_is_named(tmp_path: Path) -> None:
    good = [line(step, loss=1.0) for step in range(4)]
    cut = read(tmp_path, *good, '{"step": 4, "lo', end="")
    assert (cut.steps_R.size, cut.problem) == (4, "")
    damaged = read(tmp_path, *good[:2], "garbage", *good[2:])
    assert damaged.steps_R.tolist() == [0, 1]
    assert "metrics.jsonl:3" in damaged.problem


@pytest.mark.parametrize("bad", ['{"loss": 1}', "[1]", '{"step": "1"}', '{"step": 0}', "\x00" * 40, '{"step": 1e400}'])
def test_whatever_is_no_step_ends_the_reading(tmp_path: Path, bad: str) -> None:
    found = read(tmp_path, line(0, loss=1.0), bad, line(5, loss=2.0))
    assert found.steps_R.tolist() == [0]
    assert found.problem.startswith("metrics.jsonl:2")


def test_no_file_is_a_problem_and_no_crash(tmp_path: Path) -> None:
    found = read_lines(tmp_path / "metrics.jsonl", FIELDS, stride=1)
    assert found.steps_R.size == 0
    assert "metrics.jsonl" in found.problem


def test_states_of_strangers_are_cut_short(tmp_path: Path) -> None:
    found = read(tmp_path, line(0, health=["x" * 5000, 7]), line(1, health="no list"))
    assert sorted(each.state for each in found.episodes) == ["7", "x" * 60]
    assert found.episodes[0] == Episode(state=found.episodes[0].state, first_step=0, last_step=0)
