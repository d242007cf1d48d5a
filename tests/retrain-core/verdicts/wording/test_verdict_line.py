"""What is said about random studies: no line contradicts its verdict, and each has size, scope and standing."""

import json
import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.records.runs.curves import Align, Direction, Metric
from retrain.report.verdicts import forest, seed_plots
from retrain.verdicts.study.comparison import Verdict
from retrain.verdicts.study.judge import judge
from retrain.verdicts.study.safeguards import with_seeds
from retrain.verdicts.study.study import NO_PLAN, Condition, Estimate, Study
from retrain.verdicts.wording import plain_words as plainly
from retrain.verdicts.wording.sentences import bracketed, limits, sized
from retrain.verdicts.wording.show import comparison_table, markdown, study_data
from retrain.verdicts.wording.verdict_line import further_lines, verdict_line
from tests.kit.pairings import pairing

RATE, LOSS = Metric("eval_correct_rate"), Metric("loss")
INTERVAL = re.compile(r"\(([\d.]+) % interval:? ([^)]*)\)")
INF = math.inf


def study_of(values, *, metric=RATE, direction=Direction.HIGHER, exploratory=(NO_PLAN,), **more):
    """A study of made-up values, one per seed; the first condition is the baseline."""
    by_seed = {label: dict(enumerate(map(float, row), start=1)) for label, row in values.items()}
    baseline, *others = by_seed
    pairings = []
    for label in others:
        seeds = tuple(seed for seed in by_seed[baseline] if seed in by_seed[label])
        left, right = ([by_seed[side][seed] for seed in seeds] for side in (baseline, label))
        pairings.append(pairing(right, left, labels=(baseline, label), seeds=seeds))
    comparisons = with_seeds(judge(pairings, alpha=0.05, direction=direction), by_seed, direction=direction)
    estimates = {
        label: {str(metric): Estimate(values=found, mean=None, interval=None)} for label, found in by_seed.items()
    }
    conditions = tuple(
        Condition(label=label, seeds=tuple(found), num_runs=len(found), estimates=estimates[label])
        for label, found in by_seed.items()
    )
    fields = {"campaign": None, "metric": metric, "direction": direction, "alpha": 0.05, "baseline": baseline}
    fields |= {"align": Align.STEPS, "budget": 20.0, "plan": None, "unknown": 0, "num_examples": 64}
    fields |= {"conditions": conditions, "metrics": (metric,), "comparisons": comparisons, "exploratory": exploratory}
    return Study(**{**dict.fromkeys(("shortest", "left_out", "undeclared"), ()), **fields, **more})


@st.composite
def studies(draw):
    """Two to four conditions over up to nine seeds each, ties and empty ones among them."""
    seeds = draw(st.integers(0, 9))
    rows = st.lists(st.integers(0, 40), min_size=seeds, max_size=seeds)
    gains = draw(st.lists(st.sampled_from([-30, 0, 0, 30]), min_size=1, max_size=3))
    values = {"base": [each / 128 for each in draw(rows)]}
    values |= {f"c{i}": [(each + gain) / 128 for each in draw(rows)] for i, gain in enumerate(gains)}
    direction = draw(st.sampled_from(Direction))
    return study_of(values, direction=direction, metric=draw(st.sampled_from([RATE, LOSS])))


def leaves_out_zero(said):
    """Whether an interval, as it is said to a reader, leaves out zero."""
    if "no upper limit" in said:
        return float(re.findall(r"at least (\S+),", said)[0]) > 0
    if "no lower limit" in said:
        return float(re.findall(r"at most (\S+),", said)[0]) < 0
    low, high = map(float, said.split(" to "))
    return low > 0 or high < 0


@settings(max_examples=40)
@given(studies())
def test_every_verdict_has_size_scope_and_standing_and_no_interval_disagrees_with_it(study):
    figure = forest(study)
    for each, row in zip(study.comparisons, comparison_table(study).rows, strict=True):
        line, decided = verdict_line(each, study), each.verdict in (Verdict.BETTER, Verdict.WORSE)
        assert line.startswith(f"{each.verdict}: ")
        assert row[-1] == each.verdict
        for level, said in INTERVAL.findall(line):
            assert leaves_out_zero(said) == decided, line
            assert float(level) / 100 == pytest.approx(each.level, abs=1e-4)
        if decided and each.interval:
            better = (each.interval[0] > 0) == (study.direction is Direction.HIGHER)
            assert better == (each.verdict is Verdict.BETTER)
            assert figure is not None
            assert "no limit" not in row[3]
        assert "inf" not in line.replace("information", "")
        assert "nan" not in line
        assert line.endswith("Exploratory: no plan was registered.")
        if each.difference is None:
            assert "no seed has a number on both sides" in line
            continue
        scope = "on these 64 examples" if study.metric.is_eval else "on the prompts of training"
        assert all(part in line for part in (f"over {len(each.seeds)} seed", scope, "Worst seed of each: base "))
        assert not re.search(r"\d more seeds", " ".join(further_lines(each, study)))
    json.dumps(study_data(study), allow_nan=False)
    assert markdown(study)


@settings(max_examples=40)
@given(studies())
def test_plain_words_name_each_condition_that_was_told_apart(study):
    told = " ".join(plainly.summary(study))
    for each in study.comparisons:
        if each.verdict in (Verdict.BETTER, Verdict.WORSE):
            assert f"{each.verdict.value.capitalize()} than base:" in told
            assert f"{each.condition}, by " in told
    if all(each.verdict is Verdict.CANNOT_TELL for each in study.comparisons):
        assert "No way is shown to be better or worse than another." in told
    assert "take this as a hint" in told
    assert "p =" not in told


def test_the_line_of_a_clear_difference():
    base = [0.711, 0.72, 0.73, 0.74, 0.75, 0.76, 0.77, 0.78]
    gains = [0.094, 0.10, 0.11, 0.115, 0.12, 0.125, 0.13, 0.142]
    study = study_of({"grpo": base, "maxrl": np.add(base, gains)}, exploratory=())
    [found] = study.comparisons
    assert verdict_line(found, study) == (
        "better: +11.7 pp (95 % interval 10.3 to 13.1), over 8 seeds, on these 64 examples. "
        "Worst seed of each: grpo 71.1%, maxrl 80.5%. Planned."
    )
    assert further_lines(found, study)[0].startswith("p = 0.0078, at most 0.05: ")
    told = plainly.summary(study)
    assert told[0].startswith("2 ways to train were compared; each was trained 8 times")
    assert told[1] == "Better than grpo: maxrl, by 11.7 percentage points more (plausible: 10.3 to 13.1)."
    assert "was registered before the runs" in told[-2]


def test_ties_reasons_and_notices_are_counted_on_every_line():
    more = ("the metric is x", "all pairs", "no seeds")
    study = study_of({"a": [0.5] * 6, "b": [0.5, 0.6, 0.7, 0.8, 0.61, 0.62]}, exploratory=more)
    [found] = study.comparisons
    for part in ("1 tied", "smallest possible p is 0.062", "6 seeds are the least"):
        assert part in further_lines(found, study)[0]
    assert verdict_line(found, study).endswith("Exploratory: the metric is x, and 2 more reasons.")
    notices = ("unknown: what was run before", "run a_s1 was run again", "the plan was sealed again " + "x" * 400)
    study = study_of({"a": [0.5] * 6, "b": [0.6] * 6, "c": [0.7] * 6}, notices=notices)
    for each in study.comparisons:
        line = verdict_line(each, study)
        assert "The ledger names: run a_s1 was run again; and 1 more." in line
        assert "unknown" not in line
    assert "The ledger" not in verdict_line(study.comparisons[0], study_of({"a": [0.5] * 6, "b": [0.6] * 6}))


@pytest.mark.parametrize(
    ("interval", "words", "cell"),
    [
        ((0.061, 0.172), "6.1 to 17.2", " [+6.1, +17.2]"),
        ((-INF, INF), "too few seeds to bound it", " [too few seeds]"),
        ((0.02, INF), "at least 2.0, no upper limit", " [+2.0, no limit]"),
        ((-INF, -0.02), "at most -2.0, no lower limit", " [no limit, -2.0]"),
        ((0.0001, 0.1), "0.01 to 10.0", " [+0.01, +10.0]"),
        ((0.0, 0.1), "0.0 to 10.0", " [0.0, +10.0]"),
    ],
)
def test_limits_in_words(interval, words, cell):
    assert limits(interval, RATE) == words
    assert bracketed(interval, RATE) == cell
    colon = ":" if any(map(math.isinf, interval)) else ""
    known = words if all(map(math.isinf, interval)) else f"98.75 % interval{colon} {words}"
    assert sized(0.05, interval, 0.9875, RATE) == f"+5.0 pp ({known})"


def test_an_open_end_is_drawn_as_one_and_seeds_keep_their_order():
    study = study_of({"a": [0.5, 0.6, 0.7], "b": [0.55, 0.75, 0.65]})
    figure = forest(study)
    assert (figure["low"], figure["high"]) == ([None], [None])
    assert figure["seeds"][0] == pytest.approx([5.0, 15.0, -5.0])
    pair = seed_plots(study)[0].figure
    assert [line["seed"] for line in pair["lines"]] == [1, 2, 3]
    assert pair["lines"][1]["y"] == pytest.approx([60.0, 75.0])
