"""Differences over held-out examples: the second scope of a verdict, and two single runs or checkpoints."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import ttest_rel

from retrain.records.runs.curves import parse_metric
from retrain.records.runs.source import find_runs
from retrain.verdicts.stats.crossed import crossed
from retrain.verdicts.study.examples import two_evaluations
from retrain.verdicts.study.study import Options, study_of
from retrain.verdicts.wording.verdict_line import advice_sentence
from tests.kit.edited import edit_lines, set_if
from tests.kit.made_runs import MadeRun, write_campaign, write_run
from tests.kit.overlapped import lines
from tests.kit.problems import codes_in

EFFECTS = {"maxrl+none": 0.0, "grpo+none": 0.05}
SEEDS = range(1, 9)


@pytest.fixture(scope="module")
def campaign(tmp_path_factory):
    folder = tmp_path_factory.mktemp("made") / "campaign"
    return write_campaign(folder, EFFECTS, seeds=SEEDS, example_spread=1.5, interaction=0.5)


def _view(folder, metric="eval_correct_rate"):
    (comparison,) = study_of(find_runs([folder]), Options(metric=parse_metric(metric, where="here"))).comparisons
    return comparison.examples


def _by_hand(folder):
    """Differences per seed and example at the last step, read the plain way."""
    sides = []
    for condition in EFFECTS:
        files = [folder / "runs" / f"{condition}_s{seed}" / "eval.jsonl" for seed in SEEDS]
        runs = [[json.loads(line) for line in file.read_text().splitlines()] for file in files]
        sides.append(
            np.array([[np.mean(x["correct"]) for x in rows if x["step"] == rows[-1]["step"]] for rows in runs])
        )
    return sides[1] - sides[0]


def test_the_view_is_about_the_examples_on_disk(campaign):
    (comparison,) = study_of(find_runs([campaign]), Options()).comparisons
    view, diffs_NE = comparison.examples, _by_hand(campaign)
    assert (view.num_seeds, view.num_examples, view.num_clusters, view.reason) == (8, 64, 64, "")
    assert view.estimate == pytest.approx(diffs_NE.mean(), abs=1e-12) == comparison.difference
    n, m = diffs_NE.shape
    columns, rows = diffs_NE.mean(axis=0), diffs_NE.mean(axis=1)
    rest = diffs_NE - rows[:, None] - columns + diffs_NE.mean()
    variance = rows.var(ddof=1) / n + columns.var(ddof=1) / m - (rest**2).sum() / ((n - 1) * (m - 1) * n * m)
    half = (view.interval[1] - view.interval[0]) / 2
    assert 1.96 * variance**0.5 < half < 2.4 * variance**0.5
    assert view.interval[0] <= comparison.interval[0]
    assert comparison.interval[1] <= view.interval[1]
    assert view.p >= comparison.p
    assert view.normal == pytest.approx(crossed(diffs_NE, level=0.95).both.interval)


def test_the_examples_are_those_of_the_last_evaluation_within_the_budget(campaign):
    estimates = set()
    for at in (20, 50):
        (comparison,) = study_of(find_runs([campaign]), Options(at=at)).comparisons
        assert comparison.examples.estimate == pytest.approx(comparison.difference, abs=1e-12)
        estimates.add(comparison.difference)
    assert len(estimates) == 2


def test_the_advice_is_measured_and_agrees_with_the_interval_that_is_shown(campaign):
    view, metric = _view(campaign), parse_metric("eval_correct_rate", where="here")
    assert view.advice is not None
    advice = view.advice
    assert advice.half_width == (view.interval[1] - view.interval[0]) / 2.0
    assert max(advice.twice_seeds.half_width, advice.twice_examples.half_width) < advice.half_width
    assert advice.seeds.number > 8
    assert advice.seeds.interval == (8, None)  # a p of 0.05 leaves nearly any true difference possible
    # two runs of each condition are timed
    rows = [lines(campaign / "runs" / f"{label}_s{seed}") for label in EFFECTS for seed in (1, 2)]
    evaluations = [[row["eval_time_s"] for row in each if row.get("eval_time_s") is not None] for each in rows]
    steps = [[row["step_time_s"] for row in each if row.get("step_time_s") is not None] for each in rows]
    assert advice.cost.seed_s == pytest.approx(sum(map(sum, steps + evaluations)) / 2)
    assert advice.cost.example_s == pytest.approx(8 * sum(map(np.median, evaluations)) / 2 / 64)
    assert " on examples like these would narrow with " in advice_sentence(view, metric)
    said = advice_sentence(replace(view, advice=replace(advice, half_width=np.inf)), metric)
    assert said.startswith("8 seeds are too few to bound it on examples like these, whatever the examples; ")


def test_both_scopes_are_printed_and_in_the_json(campaign, compare, compare_json):
    line = next(each for each in compare(campaign).out.splitlines() if each.startswith("grpo+none: "))
    assert "over 8 seeds, on these 64 examples; on examples like these: +5.0 pp (95 % interval" in line
    assert "8 seeds are too few to say" in compare(campaign, "--markdown").out
    (comparison,) = compare_json(campaign)["comparisons"]
    assert comparison["examples"]["num_examples"] == 64
    assert comparison["examples"]["advice"]["seeds"]["interval"] == [8, None]


def test_runs_without_the_file_or_with_another_say_so(tmp_path, compare):
    folder = write_campaign(tmp_path / "campaign", EFFECTS, seeds=(1, 2, 3), steps=20, example_spread=1.5)
    assert _view(folder).interval == (-np.inf, np.inf)  # three seeds have no limit, whatever the examples say
    first = folder / "runs" / "grpo+none_s1" / "eval.jsonl"
    text = first.read_text()
    first.write_text(text.replace('"made-7"', '"other-7"'))
    assert "64 examples and" in _view(folder).reason
    assert "63 of them the same" in _view(folder).reason
    first.write_text((folder / "runs" / "grpo+none_s2" / "eval.jsonl").read_text())
    assert "metrics.jsonl" in _view(folder).reason  # another run's file
    first.unlink()
    assert ": unknown, since grpo+none_s1 has no eval.jsonl" in compare(folder).out


@pytest.mark.parametrize(
    ("field", "value", "is_known"),
    [
        ("step_time_s", None, False),
        ("step_time_s", 0.01, True),
        ("eval_time_s", None, False),
        ("eval_time_s", 0.0, False),
    ],
)
def test_a_cost_needs_the_times_of_steps_and_of_evaluations(field, value, is_known, tmp_path):
    folder = write_campaign(tmp_path / "campaign", EFFECTS, seeds=(1, 2), steps=10, example_spread=1.5)
    for file in folder.glob("runs/*/metrics.jsonl"):
        edit_lines(file, set_if(field, lambda _: value))
    view = _view(folder)
    assert (view.num_seeds, view.reason, view.advice.cost is not None) == (2, "", is_known)


def test_a_clear_difference_of_few_seeds_has_the_p_value_of_the_seeds_and_of_many_no_advice(tmp_path):
    effects = {"maxrl+none": 0.0, "grpo+none": 0.3}
    few, many = (
        _view(write_campaign(tmp_path / str(seeds), effects, seeds=range(seeds), steps=10, example_spread=1.0))
        for seeds in (3, 7)
    )
    assert (few.p, few.advice is None, many.advice) == (0.25, False, None)


def test_runs_that_answer_alike_have_no_spread(tmp_path):
    folder = write_campaign(tmp_path / "campaign", EFFECTS, seeds=(1, 2), steps=10, example_spread=1.5)
    for seed in (1, 2):
        first, second = (folder / "runs" / f"{label}_s{seed}" for label in EFFECTS)
        for name in ("metrics.jsonl", "eval.jsonl"):
            (second / name).write_bytes((first / name).read_bytes())
    view = _view(folder)
    assert (view.estimate, view.interval, view.num_examples, view.num_clusters) == (0.0, None, 64, 64)
    assert "spread" in view.reason


def test_examples_of_few_sources_are_worth_less(tmp_path):
    folder = write_campaign(
        tmp_path / "campaign", EFFECTS, seeds=SEEDS, steps=20, example_spread=1.5, interaction=1.0, clusters=8
    )
    view, fooled = _view(folder), crossed(_by_hand(folder)).both
    assert (view.num_examples, view.num_clusters) == (64, 8)
    assert np.diff(view.interval)[0] > 1.3 * np.diff(fooled.interval)[0]


@pytest.fixture
def runs(tmp_path):
    fixed = {"seed": 7, "steps": 20, "example_spread": 1.0}
    made = [MadeRun(condition=f"{label}+none", effect=effect, **fixed) for label, effect in (("a", 0.0), ("b", 0.2))]
    return [write_run(tmp_path / run.condition[0], run) for run in made]


def last_rows(run):
    rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    return [row for row in rows if row["step"] == rows[-1]["step"]]


def test_two_runs_are_compared_by_a_paired_t_test_over_examples(runs, compare, compare_json):
    found, said = compare_json(*runs), compare(*runs).out.splitlines()[0]
    expected = ttest_rel(*([np.mean(row["correct"]) for row in last_rows(run)] for run in reversed(runs)))
    two = found["two_runs"]
    assert two["p"] == pytest.approx(expected.pvalue)
    assert two["interval"] == pytest.approx(list(expected.confidence_interval()))
    assert two["difference"] == pytest.approx(found["comparisons"][0]["difference"])
    assert found["comparisons"][0]["verdict"] == "cannot tell"
    assert found["answer"] == said
    assert "these two policies" in said
    assert "nothing about how they were trained" in said


def test_two_seeds_of_one_condition_are_two_policies(tmp_path, compare_json):
    made = [write_run(tmp_path / str(seed), MadeRun(seed=seed, steps=20, example_spread=1.0)) for seed in (1, 2)]
    found = compare_json(*made)
    assert found["comparisons"] == []
    assert found["two_runs"]["num_examples"] == 64


def test_files_of_two_checkpoints(runs, tmp_path, compare, compare_json):
    files = []
    for run in runs:
        kept = [{"model": "m", "checkpoint": "final"}, *last_rows(run)]
        files.append(tmp_path / f"{run.name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in kept))
    found = compare_json(*files)
    assert two_evaluations(files, None).difference == found["difference"]
    same = two_evaluations([files[0], files[0]], None)
    assert (same.difference, same.interval, same.p, same.num_examples) == (0.0, None, None, 64)
    of_runs = compare_json(*runs)["two_runs"]
    assert [found["p"], *found["interval"]] == pytest.approx([of_runs["p"], *of_runs["interval"]])
    assert "these two policies" in compare(*files).out
    assert compare(*files, "--all-pairs").code == 2
    assert codes_in(compare(*files, "--metric", "loss").err) == ["compare.metric-not-in-file"]
    for text, code in {
        '{"model": "m"}\n{"example": "x", "correct": [true]}\n': "compare.other-examples",
        '{"model": "m"}\n{"example": "x", "correct": 3}\n': "compare.no-evaluation",
        '{"model": "m"}\n': "compare.no-evaluation",
        "not json\n": "record.unreadable",
    }.items():
        files[1].write_text(text)
        refused = compare(*files)
        assert (refused.code, codes_in(refused.err), str(files[1]) in refused.err) == (2, [code], True)


def test_samplers_that_differ_are_warned_of_where_they_chose_the_prompts(tmp_path, compare):
    made = [
        MadeRun(condition=label, seed=seed, steps=20, config={"data": {"sampler": sampler}})
        for label, sampler in (("a+none", "uniform"), ("b+none", "thompson"))
        for seed in range(6)
    ]
    runs = [write_run(tmp_path / f"{run.condition}{run.seed}", run) for run in made]
    warned = compare(*runs, "--metric", "correct_rate").out
    assert "the samplers differ (thompson, uniform), so correct_rate is of other prompts" in warned
    assert "the samplers differ" not in compare(*runs, "--metric", "eval_correct_rate").out
