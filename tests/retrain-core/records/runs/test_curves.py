"""The reader of `metrics.jsonl` against JSON itself, and hostile files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError
from retrain.records.runs.curves import EVAL_KEPT, LARGEST, Curves, read_curves
from tests.kit.problems import codes_in

FIELDS = ("correct_rate", "sampled_tokens", "step_time_s")
NAMES = st.sampled_from(
    [*FIELDS, *EVAL_KEPT, "eval_pass_at_4", "eval_other", 'x"correct_rate', ', "correct_rate', "\\", "condition"]
)
VALUES = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False),
    st.integers(-(10**12), 10**12),
    st.none(),
    st.booleans(),
    st.sampled_from(['"correct_rate": 7', ', "correct_rate": 7', "}", "\\", "\x1b[2J", "ü", "NaN"]),
    st.just({"correct_rate": 9.0, "eval_correct_rate": 9.0}),
)


def write(folder: Path, *lines: object, end: str = "\n") -> Path:
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(texts) + end, encoding="utf-8")
    return file


def expected(record: dict[str, Any], name: str) -> float:
    value = record.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    return float(value) if is_number else math.nan


@given(rows=st.lists(st.dictionaries(NAMES, VALUES), max_size=5), compact=st.booleans(), ascii_only=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_every_line_is_read_as_json_reads_it(
    tmp_path: Path, rows: list[dict[str, Any]], compact: bool, ascii_only: bool
) -> None:
    records = [{"step": step} | row for step, row in enumerate(rows)]
    separators = (",", ":") if compact else None
    lines = [json.dumps(record, separators=separators, ensure_ascii=ascii_only) for record in records]
    curves = read_curves(write(tmp_path, *lines), FIELDS)
    assert curves.steps_R.tolist() == list(range(len(rows)))
    for name in (*FIELDS, *EVAL_KEPT, "eval_pass_at_4"):
        np.testing.assert_array_equal(curves.column(name), [expected(record, name) for record in records])
    assert "eval_other" not in curves.values


def test_a_synthetic_run_is_read_like_a_real_one(made: Any, tmp_path: Path) -> None:
    folder = made.write_run(tmp_path / "run", made.MadeRun(steps=45))
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    curves = read_curves(folder / "metrics.jsonl", (*FIELDS, "eval_ci_low"))
    assert (curves.num_steps, curves.steps_R[0]) == (45, -1)
    for name in (*FIELDS, "eval_correct_rate", "eval_pass_at_2", "eval_pass_at_4", "eval_ci_low"):
        np.testing.assert_array_equal(curves.column(name), [expected(record, name) for record in records])
    assert np.isfinite(curves.column("eval_correct_rate")).nonzero()[0].tolist() == [0, 20, 40, 45]


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    last = json.dumps({"step": 1, "condition": "a}b", "correct_rate": 0.75})
    for cut in range(1, 30):
        file = write(tmp_path, {"step": 0, "correct_rate": 0.5}, last[:-cut], end="")
        assert read_curves(file, FIELDS).column("correct_rate").tolist() == [0.5]
    assert read_curves(write(tmp_path, {"step": 0, "correct_rate": 0.5}, last, end=""), FIELDS).num_steps == 2


DAMAGED = ['{"step": 1, "correct_rate": %s}' % each for each in ("NaN", "-Infinity", "0.5x")]
DAMAGED += ['{"step": 1, "eval_correct_rate": NaN}', '{"step": 1, "correct_rate": 0.5', '{"correct_rate": 0.5}']
DAMAGED += ['{"step": %s}' % each for each in ('"1"', "0.5", "true", "0", "-1")] + ["[1]", "\x07", "[" * 100_000]


@pytest.mark.parametrize("line", DAMAGED)
def test_damage_is_named_with_its_line(tmp_path: Path, line: str) -> None:
    file = write(tmp_path, {"step": 0}, line, {"step": 2})
    with pytest.raises(ConfigError) as caught:
        read_curves(file, FIELDS)
    assert (codes_in(caught), caught.value.problems[0].where) == (["record.unreadable"], f"{file}:2")


def test_null_text_and_huge_numbers_are_no_numbers(tmp_path: Path) -> None:
    rows = [{"step": i, "correct_rate": value} for i, value in enumerate([None, "0.5", True, [1], 10**400])]
    curves = read_curves(write(tmp_path, *rows, '{"step": 9, "correct_rate": 1e999}'), FIELDS)
    assert not curves.has("correct_rate")
    assert curves.num_steps == 10
    large = read_curves(write(tmp_path, '{"step": 0, "correct_rate": 1e300, "eval_correct_rate": -1e300}'), FIELDS)
    assert large.values == {}


def test_blank_lines_and_windows_line_ends_are_no_damage(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 0, "correct_rate": 0.5}\r\n\r\n\n{"step": 1, "correct_rate": 0.25}\r\n')
    assert read_curves(file, FIELDS).column("correct_rate").tolist() == [0.5, 0.25]


def test_a_missing_file_is_named_and_an_empty_one_has_no_steps(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        read_curves(tmp_path / "metrics.jsonl", FIELDS)
    assert codes_in(caught) == ["record.unreadable"]
    (tmp_path / "metrics.jsonl").touch()
    empty: Curves = read_curves(tmp_path / "metrics.jsonl", FIELDS)
    assert (empty.num_steps, empty.has("correct_rate")) == (0, False)
