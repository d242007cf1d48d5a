"""Reading `metrics.jsonl` and `eval.jsonl` against JSON itself and hostile files; curves on a common budget."""

import json
import math

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scipy.integrate import trapezoid

from retrain.kernel.errors import ConfigError
from retrain.records.runs.curves import (
    EVAL_KEPT,
    LARGEST,
    Align,
    Curves,
    Direction,
    Metric,
    Summary,
    along,
    read_curves,
    value_at,
)
from retrain.records.runs.example_rates import (
    ExampleRates,
    NoExamplesError,
    PerExample,
    aligned,
    per_example,
    read_rates,
)
from tests.kit.problems import codes_in, refused

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


def write(folder, *lines, end="\n"):
    texts = [line if isinstance(line, str) else json.dumps(line, ensure_ascii=False) for line in lines]
    file = folder / "metrics.jsonl"
    file.write_text("\n".join(texts) + end, encoding="utf-8")
    return file


def expected(record, name):
    value = record.get(name)
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    return float(value) if is_number else math.nan


@given(rows=st.lists(st.dictionaries(NAMES, VALUES), max_size=5), compact=st.booleans(), ascii_only=st.booleans())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
def test_every_line_is_read_as_json_reads_it(tmp_path, rows, compact, ascii_only):
    records = [{"step": step} | row for step, row in enumerate(rows)]
    separators = (",", ":") if compact else None
    lines = [json.dumps(record, separators=separators, ensure_ascii=ascii_only) for record in records]
    curves = read_curves(write(tmp_path, *lines), FIELDS)
    assert curves.steps_R.tolist() == list(range(len(rows)))
    for name in (*FIELDS, *EVAL_KEPT, "eval_pass_at_4"):
        np.testing.assert_array_equal(curves.column(name), [expected(record, name) for record in records])
    assert "eval_other" not in curves.values


def test_lines_that_hold_no_numbers_are_read_without_damage(tmp_path):
    last = json.dumps({"step": 1, "condition": "a}b", "correct_rate": 0.75})
    for cut in range(1, 30):
        file = write(tmp_path, {"step": 0, "correct_rate": 0.5}, last[:-cut], end="")
        assert read_curves(file, FIELDS).column("correct_rate").tolist() == [0.5]
    assert read_curves(write(tmp_path, {"step": 0, "correct_rate": 0.5}, last, end=""), FIELDS).num_steps == 2
    rows = [{"step": i, "correct_rate": value} for i, value in enumerate([None, "0.5", True, [1], 10**400])]
    curves = read_curves(write(tmp_path, *rows, '{"step": 9, "correct_rate": 1e999}'), FIELDS)
    assert not curves.has("correct_rate")
    assert curves.num_steps == 10
    large = read_curves(write(tmp_path, '{"step": 0, "correct_rate": 1e300, "eval_correct_rate": -1e300}'), FIELDS)
    assert large.values == {}
    file = tmp_path / "metrics.jsonl"
    file.write_bytes(b'{"step": 0, "correct_rate": 0.5}\r\n\r\n\n{"step": 1, "correct_rate": 0.25}\r\n')
    assert read_curves(file, FIELDS).column("correct_rate").tolist() == [0.5, 0.25]
    file.unlink()
    assert refused(read_curves, file, FIELDS) == ["record.unreadable"]
    file.touch()
    empty = read_curves(file, FIELDS)
    assert (empty.num_steps, empty.has("correct_rate")) == (0, False)


DAMAGED = [f'{{"step": 1, "correct_rate": {each}}}' for each in ("NaN", "-Infinity", "0.5x")]
DAMAGED += ['{"step": 1, "eval_correct_rate": NaN}', '{"step": 1, "correct_rate": 0.5', '{"correct_rate": 0.5}']
DAMAGED += [f'{{"step": {each}}}' for each in ('"1"', "0.5", "true", "0", "-1")] + ["[1]", "\x07", "[" * 100_000]


@pytest.mark.parametrize("line", DAMAGED)
def test_damage_is_named_with_its_line(tmp_path, line):
    file = write(tmp_path, {"step": 0}, line, {"step": 2})
    with pytest.raises(ConfigError) as caught:
        read_curves(file, FIELDS)
    assert (codes_in(caught), caught.value.problems[0].where) == (["record.unreadable"], f"{file}:2")


RATE, HELD_OUT = "correct_rate", "eval_correct_rate"
NAN = math.nan


def spent(values, *, field=RATE, first=0, align="steps", **costs):
    steps_R = np.arange(first, first + len(values), dtype=float)
    columns = {field: np.array(values, dtype=float)} | {n: np.array(c, dtype=float) for n, c in costs.items()}
    return along(Curves(steps_R=steps_R, values=columns), Align(align))


def value(curve, summary, *, field=RATE, budget=math.inf, **more):
    return value_at(curve, Metric(field, Summary(summary)), budget=budget, **more)


def test_summaries_are_taken_of_the_steps_with_a_number():
    curve = spent(np.arange(40) / 40)
    assert value(curve, "final") == pytest.approx(np.mean(np.arange(36, 40) / 40))
    assert value(curve, "final", budget=20) == pytest.approx(np.mean([18 / 40, 19 / 40]))
    assert value(curve, "final", last=1) == 39 / 40
    assert value(curve, "final", last=10**9) == pytest.approx(np.mean(np.arange(40) / 40))
    assert value(spent([0.5]), "final") == 0.5
    assert value(spent([0.5, NAN, 0.7, NAN]), "final", last=2) == 0.7
    assert value(spent([0.5, 0.7, NAN, NAN]), "final", last=2) is None
    assert value(spent([NAN, NAN]), "best") is None
    assert value(spent([NAN, NAN]), "auc") is None
    assert value(spent([0.5, NAN, 0.7]), "best", last=2) == pytest.approx(0.6)
    curve = spent([0.0, 0.9, 0.1, 0.5, 0.6, 0.0])
    assert value(curve, "best", last=2) == pytest.approx(0.55)
    assert value(curve, "best", last=1) == 0.9
    assert value(curve, "best", last=2, direction=Direction.LOWER) == pytest.approx(0.3)
    assert value(curve, "best", last=2, budget=3) == pytest.approx(0.5)
    values = [0.9, NAN, 0.3, NAN, 0.5, NAN]
    curve = spent(values, field=HELD_OUT, first=-1)
    assert value(curve, "final", field=HELD_OUT) == 0.5
    assert value(curve, "best", field=HELD_OUT) == 0.5
    assert value(curve, "final", field=HELD_OUT, budget=3) == 0.3
    assert value(curve, "final", field=HELD_OUT, budget=1) is None
    assert value(curve, "auc", field=HELD_OUT, budget=4) == pytest.approx(trapezoid([0.9, 0.3, 0.5], [0, 2, 4]) / 4)


@given(
    values=st.lists(st.floats(-10, 10), min_size=2, max_size=30),
    costs=st.lists(st.floats(0.1, 10), min_size=30, max_size=30),
    part=st.floats(0.0, 1.0),
)
def test_the_area_is_scipys_cut_at_the_budget(values, costs, part):
    curve = spent(values, align="tokens", sampled_tokens=costs[: len(values)])
    x = np.cumsum(costs[: len(values)])
    budget = float(x[0] + part * (x[-1] - x[0]))
    dense = np.unique(np.append(x[x <= budget], budget))
    found = value(curve, "auc", budget=budget)
    if len(dense) == 1:
        assert found == values[0]
    else:
        want = trapezoid(np.interp(dense, x, values), dense) / (dense[-1] - dense[0])
        assert found == pytest.approx(want, abs=1e-6)


def test_tokens_and_seconds_are_cumulated_and_evaluation_is_free():
    values, tokens, seconds = [0.1, 0.2, 0.3, 0.4], [5, 10, NAN, 30], [9.0, 1.0, 2.0, 3.0]
    costs = {"sampled_tokens": tokens, "step_time_s": seconds}
    assert spent(values, first=-1, align="tokens", **costs).spent_R.tolist() == [0, 10, 10, 40]
    assert spent(values, first=-1, align="seconds", **costs).spent_R.tolist() == [0, 1, 3, 6]
    assert spent(values, first=-1).spent_R.tolist() == [0, 1, 2, 3]
    assert along(Curves(steps_R=np.arange(2.0), values={}), Align.TOKENS) is None


HELD_OUT_RATE = PerExample(name="held_out", kind="correct_rate", k=0)


def _line(step, named, marks, *, name="held_out", **more):
    scores = [float(each) for each in marks]
    record = {"step": step, "set": name, "example": named, "cluster": named, "scores": scores, "correct": marks}
    return json.dumps(record | more) + "\n"


def _write(folder, *lines):
    folder.mkdir(exist_ok=True)
    (folder / "eval.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder


@settings(max_examples=30)
@given(
    counts=st.dictionaries(st.integers(-1, 40), st.integers(1, 5), max_size=12),
    step=st.integers(-1, 41),
    pad=st.integers(0, 300),
)
def test_the_lines_of_a_step_are_found_wherever_they_are(tmp_path_factory, counts, step, pad):
    lines = [
        _line(at, f"{at}-{index}", [index % 2 == 0], extra="x" * (pad * (index % 3)))
        for at in sorted(counts)
        for index in range(counts[at])
    ]
    folder = _write(tmp_path_factory.mktemp("run") / "run", *lines)
    if step not in counts:
        with pytest.raises(NoExamplesError, match=f"nothing about step {step}"):
            read_rates(folder, HELD_OUT_RATE, step=step, expected=0.0)
        return
    expected = float(np.mean([index % 2 == 0 for index in range(counts[step])]))
    found = read_rates(folder, HELD_OUT_RATE, step=step, expected=expected)
    assert found.ids == tuple(f"{step}-{index}" for index in range(counts[step]))
    assert found.values_E.mean() == expected


def test_sets_are_kept_apart_and_a_cut_line_is_left_out(tmp_path):
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
    with pytest.raises(NoExamplesError, match=r"other has no eval\.jsonl"):
        read_rates(tmp_path / "other", HELD_OUT_RATE, step=3, expected=1.0)
    folder = _write(tmp_path / "run", _line(3, "a", [True]), _line(3, "b", [False])[:-20])
    assert read_rates(folder, HELD_OUT_RATE, step=3, expected=1.0).ids == ("a",)


@pytest.mark.parametrize("metric", ["correct_rate", "eval_time_s", "eval_correct_rate:best", "eval_correct_rate:auc"])
def test_a_metric_without_one_evaluation_has_no_examples(metric):
    field, _, summary = metric.partition(":")
    with pytest.raises(NoExamplesError, match="evaluation: only" if summary else "not a mean over held-out examples"):
        per_example(Metric(field, Summary(summary or "final")))


DAMAGED_RATES = {"no list `correct`": [_line(3, "a", [True], correct=each) for each in (["yes"], [])]}
DAMAGED_RATES |= {
    "cannot be read": [_line(3, "a", [True]) + "{broken\n"],
    "no text": [_line(3, "a", [True], example=7)],
}
DAMAGED_RATES |= {"gives 0 at step 3, metrics.jsonl 1": [_line(3, "a", [False])]}


@pytest.mark.parametrize("why", DAMAGED_RATES)
def test_a_damaged_or_foreign_file_is_named(tmp_path, why):
    for text in DAMAGED_RATES[why]:
        with pytest.raises(NoExamplesError, match=why):
            read_rates(_write(tmp_path / "run", text), HELD_OUT_RATE, step=3, expected=1.0)


def _rates(ids, values, clusters=""):
    return ExampleRates(ids=tuple(ids), clusters=tuple(clusters or ids), values_E=np.array(values), lines=len(ids))


def test_examples_are_matched_by_id():
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
def test_what_does_not_match_is_refused(other, why):
    with pytest.raises(NoExamplesError, match=why):
        aligned([("x", _rates("abc", [1, 2, 3])), ("y", other)])
