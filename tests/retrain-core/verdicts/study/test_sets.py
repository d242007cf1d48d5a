"""Several evaluation sets, with aggregates as rliable 1.2.0 gives them; and the sources of variance of a condition."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.kernel.seeding import Seeds
from retrain.records.runs.curves import Metric, parse_metric
from retrain.records.runs.source import Candidate
from retrain.verdicts.study.sets import (
    bootstrap,
    improvement_over_benchmarks,
    interquartile_mean,
    optimality_gap,
    performance_profile,
    set_metrics,
)
from retrain.verdicts.study.variance import decompose, variance_data, variance_sentences
from tests.kit.edited import edit, edit_lines
from tests.kit.made_runs import MadeRun, write_run
from tests.kit.problems import codes_in, refused

EFFECTS = {"grpo+none": 0.0, "maxrl+none": 0.1}


@pytest.fixture
def campaign(made, tmp_path):
    """A campaign whose runs have the sets `hard` (half the held-out rate) and `short` (2 pp more)."""

    def make(*, seeds=range(9), sets=("hard", "short"), missing=""):
        folder = made.write_campaign(
            tmp_path, EFFECTS, seeds=seeds, steps=5, config={"eval": {"sets": {name: {} for name in sets}}}
        )
        for run in (folder / "runs").iterdir():

            def further(line, *, is_hard=run.name != missing):
                if rate := line.get("eval_correct_rate"):
                    line["eval_short_correct_rate"] = min(1.0, rate + 0.02)
                    line |= {"eval_hard_correct_rate": rate / 2} if is_hard else {}
                    line |= {f"eval_{name}mean_reward": size * rate for name, size in (("", 2.0), ("hard_", -1.0))}

            edit_lines(run / "metrics.jsonl", further)
        return folder

    return make


@pytest.fixture
def tasks(made, tmp_path):
    """A campaign of two tasks: the condition is better on `sums`, and on `products` as much worse as `loss` says."""

    def make(loss, *, seeds=range(9)):
        config = {"data": {"tasks": [{"name": "sums"}, {"name": "products"}]}}
        folder = made.write_campaign(tmp_path, EFFECTS, seeds=seeds, steps=5, config=config)
        for run in (folder / "runs").iterdir():

            def by_task(line, *, name=run.name):
                if rate := line.pop("eval_correct_rate", None):
                    line["eval_sums_correct_rate"] = rate
                    line["eval_products_correct_rate"] = 0.3 + 0.1 * rate - (loss if name.startswith("maxrl") else 0.0)
                    line["eval_correct_rate"] = (rate + line["eval_products_correct_rate"]) / 2
                line |= {"task_sums_correct_rate": 0.5, "task_products_correct_rate": 0.4}

            edit_lines(run / "metrics.jsonl", by_task)
        return folder

    return make


def test_a_verdict_names_its_tasks_and_a_loss_on_one_is_a_sentence(tasks, compare, compare_json):
    folder = tasks(0.08)
    content = compare_json(folder)
    view, (comparison,) = content["sets"], content["comparisons"]
    assert view["names"] == view["tasks"] == ["sums", "products"]
    assert {each["num_comparisons"] for each in view["comparisons"][0]["per_set"]} == {3}
    assert "of the tasks sums and products (macro: each task counts the same)" in comparison["line"]
    sentence = r"\. Better on sums \(\+\S+ pp\), worse on products \(-\S+ pp\), corrected over 3 comparisons \(Holm\)"
    assert re.search(f"{sentence}; the mean over tasks hides a loss\\.", comparison["line"])
    assert content["answer"] in compare(folder).out.replace("\n", " ") or "sums and products" in content["answer"]


def test_without_a_loss_no_sentence_says_so_and_a_metric_of_one_task_is_about_it(tasks, compare_json):
    folder = tasks(-0.1)
    assert "hides a loss" not in compare_json(folder)["comparisons"][0]["line"]
    one = compare_json(folder, "--metric", "eval_sums_correct_rate")
    assert "of the tasks" not in one["comparisons"][0]["line"]
    training = compare_json(folder, "--metric", "correct_rate")
    assert [f"task_{name}_correct_rate" for name in training["sets"]["names"]] == [
        "task_sums_correct_rate",
        "task_products_correct_rate",
    ]


def test_the_family_is_sets_and_their_mean_times_conditions(campaign, compare_json, compare):
    folder = campaign()
    content = compare_json(folder, "--sets")
    view = content["sets"]
    assert view["names"] == ["held_out", "hard", "short"]
    (pair,) = view["comparisons"]
    family = [pair["overall"], *pair["per_set"]]
    assert {each["num_comparisons"] for each in family} == {4}
    assert [each["verdict"] for each in family] == ["better"] * 4
    held_out, alone = pair["per_set"][0], content["comparisons"][0]
    assert held_out["difference"] == alone["difference"]
    assert held_out["p_holm"] > alone["p_holm"]  # of four, not of one
    assert pair["improvement"] > 0.9
    shown = compare(folder, "--sets").out
    assert "Verdicts over sets" in shown
    assert "4 comparisons in one family (Holm)" in shown
    assert compare_json(folder)["sets"] is None


def test_aggregates_are_those_of_the_values(campaign, compare_json):
    folder = campaign()
    rewards = compare_json(folder, "--sets", "--metric", "eval_mean_reward")["sets"]
    scores = np.concatenate([each["scores"] for each in rewards["conditions"]])
    assert rewards["thresholds"] == pytest.approx(np.linspace(scores.min(), scores.max(), 101))
    assert [each["gap"] for each in rewards["conditions"]] == [None, None]
    content = compare_json(folder, "--sets")
    view = content["sets"]
    assert view["thresholds"] == pytest.approx(np.linspace(0, 1, 101))
    other = view["conditions"][1]
    values = np.array(other["scores"])
    rates = content["conditions"][1]["metrics"]["eval_correct_rate:final"]["values"]
    assert values[:, 0].tolist() == [rates[str(seed)] for seed in other["seeds"]]
    assert other["set_means"] == pytest.approx(values.mean(axis=0))
    assert other["mean"]["value"] == pytest.approx(values.mean())
    interval = stats.t.interval(0.95, 8, values.mean(axis=1).mean(), stats.sem(values.mean(axis=1)))
    assert other["mean"]["interval"] == pytest.approx(interval)
    assert other["iqm"]["value"] == pytest.approx(stats.trim_mean(values, 0.25, axis=None))
    assert other["gap"]["value"] == pytest.approx(1 - values.mean())
    low, high = other["iqm"]["interval"]
    assert low < other["iqm"]["value"] < high
    assert other["profile"] == pytest.approx([(values > threshold).mean() for threshold in view["thresholds"]])


def test_a_run_that_lacks_a_set_is_left_out_of_the_mean_alone(campaign, compare_json):
    view = compare_json(campaign(missing="maxrl+none_s4"), "--sets")["sets"]
    (pair,) = view["comparisons"]
    assert [len(each["seeds"]) for each in (pair["overall"], *pair["per_set"])] == [8, 9, 8, 9]
    assert 4 not in view["conditions"][1]["seeds"]


def test_two_sets_are_enough_and_a_condition_without_one_has_no_mean(campaign, compare_json):
    folder = campaign()
    for file in folder.glob("runs/*/metrics.jsonl"):
        edit_lines(file, lambda line: line.pop("eval_short_correct_rate", None))
    view = compare_json(folder, "--sets")["sets"]
    assert view["names"] == ["held_out", "hard"]
    for file in folder.glob("runs/maxrl*/metrics.jsonl"):
        edit_lines(file, lambda line: line.pop("eval_hard_correct_rate", None))
    (pair,) = compare_json(folder, "--sets")["sets"]["comparisons"]
    assert (pair["improvement"], pair["overall"]["verdict"]) == (None, "cannot tell")


def test_few_seeds_have_no_limit_rather_than_a_verdict(campaign, compare, compare_json):
    folder = campaign(seeds=range(6))
    content = compare_json(folder, "--sets")
    assert content["comparisons"][0]["verdict"] == "better"
    (pair,) = content["sets"]["comparisons"]
    assert (pair["overall"]["verdict"], pair["overall"]["interval"]) == ("cannot tell", [None, None])
    assert "8 seeds are the least for a verdict in it" in compare(folder, "--sets").out
    for seeds in ([1], [1, 2]):
        shutil.rmtree(folder / "runs")
        first = compare_json(campaign(seeds=seeds), "--sets")["sets"]["conditions"][0]
        has_interval = [first[name]["interval"] is not None for name in ("mean", "iqm", "gap")]
        assert has_interval == [len(seeds) > 1] * 3


def test_runs_with_a_single_set_are_refused(made, tmp_path, compare):
    result = compare(made.write_campaign(tmp_path, EFFECTS, seeds=range(3), steps=5), "--sets")
    assert (result.code, codes_in(result.err)) == (2, ["compare.single-set"])


MEASURES = {None: "correct_rate:final", "eval_hard_mean_reward:best": "mean_reward:best"}


@pytest.mark.parametrize(("requested", "measure"), [*MEASURES.items(), ("eval_pass_at_4", "pass_at_4:final")])
def test_the_measure_is_taken_of_every_set(requested, measure):
    """Also where a set is called as a measure begins."""
    record = {"config": {"eval": {"sets": {"correct": {}, "hard": {}, "mean": {}}}}}
    run = Candidate(name="a", condition="a", seed=1, folder=None, state="done", record=record)
    broken = Candidate(name="b", condition="a", seed=2, folder=None, state="done", record={"config": {"eval": [1]}})
    metric = parse_metric(requested, where="test") if requested else None
    found = set_metrics([run, broken], metric)
    assert list(found) == ["held_out", "correct", "hard", "mean"]
    prefixes = ("", "correct_", "hard_", "mean_")
    assert [str(each) for each in found.values()] == [f"eval_{prefix}{measure}" for prefix in prefixes]
    assert Metric("eval_hard_pass_at_4").is_rate


RLIABLE = json.loads(Path(__file__).with_name("rliable.json").read_text(encoding="utf-8"))
A_NM, B_NM = (np.array(RLIABLE[name]) for name in "ab")
TENTHS_T = np.linspace(0.0, 1.0, 11)


def mean_score(scores_NM):
    return np.asarray(scores_NM.mean(axis=(-2, -1)))


STATISTICS = {"iqm": interquartile_mean, "gap": optimality_gap, "mean": mean_score}
SCORES = st.lists(st.lists(st.floats(0.0, 1.0), min_size=3, max_size=3), min_size=2, max_size=9).map(np.array)


def test_aggregates_are_rliables_and_whole_runs_keep_what_sets_have_in_common():
    assert [float(interquartile_mean(each)) for each in (A_NM, B_NM)] == pytest.approx(RLIABLE["iqm"])
    assert [float(mean_score(each)) for each in (A_NM, B_NM)] == pytest.approx(RLIABLE["mean"])
    assert float(optimality_gap(A_NM)) == pytest.approx(RLIABLE["gap"])
    assert float(optimality_gap(np.array([[0.5, 1.0], [1.5, 3.0]]))) == 0.125  # scores above 1 make up for none
    assert improvement_over_benchmarks(A_NM, B_NM) == pytest.approx(RLIABLE["improvement"])
    assert performance_profile(A_NM, TENTHS_T) == pytest.approx(RLIABLE["profile"])
    # A seed that is good on all sets makes the mean over sets as uncertain as one set; per-set drawing forgets
    # it.
    common_NM = np.repeat(np.linspace(0.2, 0.8, 8)[:, None], 6, axis=1)
    stream = Seeds(2).stream
    whole, stratified = (bootstrap(common_NM, mean_score, stream("test"), is_stratified=each) for each in (False, True))
    assert whole[1] - whole[0] > 2.0 * (stratified[1] - stratified[0])


@pytest.mark.parametrize("name", STATISTICS)
def test_the_stratified_interval_is_rliables_up_to_drawing(name):
    limits = bootstrap(A_NM, STATISTICS[name], Seeds(1).stream("test"), resamples=10_000, is_stratified=True)
    assert [float(limits[0]), float(limits[1])] == pytest.approx(RLIABLE["limits"][name], abs=3e-3)


@settings(max_examples=15)
@given(SCORES, st.permutations(range(3)))
def test_aggregates_stay_between_the_scores_whatever_the_order(scores_NM, order):
    value = float(interquartile_mean(scores_NM))
    assert scores_NM.min() - 1e-12 <= value <= scores_NM.max() + 1e-12
    assert float(interquartile_mean(scores_NM[::-1, order])) == pytest.approx(value)
    profile_T = performance_profile(scores_NM, TENTHS_T)
    assert (np.diff(profile_T) <= 0.0).all()
    assert float(profile_T[-1]) == 0.0
    both = improvement_over_benchmarks(scores_NM, scores_NM[:2]) + improvement_over_benchmarks(scores_NM[:2], scores_NM)
    assert both == pytest.approx(1.0)


@pytest.mark.parametrize("scores_NM", [np.ones((1, 3)), np.ones((3, 0)), np.array([[0.1], [np.nan]])])
def test_what_cannot_be_resampled_is_refused(scores_NM):
    with pytest.raises(ValueError, match="finite scores of two runs or more"):
        bootstrap(scores_NM, mean_score, Seeds(0).stream("test"))


@pytest.fixture
def crossed(tmp_path):
    """`crossed(apart)`: 4 x 4 runs; `apart(data, init)` are their `[training] seeds`, data order decides the rate."""

    def write(apart):
        folders = []
        for data, init in np.ndindex(4, 4):
            config = {"training": {"seeds": apart(data, init), "lr": 1e-3}, "eval": {"seed": 0}}
            run = MadeRun(seed=1 + 4 * data + init, steps=4, eval_every=2, config=config)
            folders.append(write_run(tmp_path / f"d{data}i{init}", run))
            _set_rate(folders[-1], 0.5 + 0.08 * data + 0.01 * init + 0.001 * ((data * init) % 3))
        return folders

    return write


def _set_rate(folder, rate):
    """The last held-out rate, and 16 examples x 4 samples of half that were right."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("eval_correct_rate", None)
    rows[-1] |= {"eval_correct_rate": rate}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"step": rows[-1]["step"], "set": "held_out", "correct": [True, False] * 2}
    (folder / "eval.jsonl").write_text("".join(json.dumps(fields | {"example": str(n)}) + "\n" for n in range(16)))


def both(data, init):
    return {"data": data, "initialisation": init}


def test_the_source_that_decides_has_the_share_and_every_row_its_name(crossed, compare_json, compare):
    runs = crossed(both)
    found = decompose(runs)
    assert compare_json(*runs, "--variance") == json.loads(json.dumps(variance_data(found)))
    order, start, rest = found.components.parts
    assert order.variance == pytest.approx((0.5 + 0.08 * np.arange(4)).var(ddof=1), rel=0.05)
    assert order.share > 0.9
    assert (str(found.metric), found.components.runs, found.conditions) == ("eval_correct_rate:final", 16, 1)
    assert (found.components.in_rest, found.components.constant) == (("sampling",), ("evaluation",))
    assert found.noise.variance == pytest.approx(0.25 / 3 / 16)  # p (1 - p) / (S - 1) / E
    assert found.noise.share == pytest.approx(found.noise.variance / found.components.total)
    assert found.noise.share < 1.0
    said = list(variance_sentences(found))
    assert compare(*runs, "--variance").out.splitlines() == said
    names = [("data order", order), ("initialisation", start), ("rest (with sampling)", rest)]
    assert [line.partition(" %")[0] for line in said[1:4]] == [f"{name}: {100 * x.share:.0f}" for name, x in names]
    assert said[4].startswith("never moved: evaluation;")
    assert said[5].endswith("it is a part of the rest.")


def test_sources_that_moved_together_are_named(crossed):
    found = decompose(crossed(lambda data, init: {"data": data, "evaluation": data}))
    assert found.components.together == (("data order", "evaluation"),)
    said = list(variance_sentences(found))
    assert "data order and evaluation always moved together: their shares cannot be separated." in said
    assert said[-1].endswith("it is a part of evaluation.")


def test_only_spread_within_runs_of_equal_settings_counts(crossed):
    runs = crossed(lambda data, init: {"data": data})
    for run in runs[8:]:
        edit(run / "run.json", lambda record: record["config"]["training"].update(lr=5e-3))
    found = decompose(runs)
    assert found.conditions == 2
    assert [part.df for part in found.components.parts] == [2, 12]  # of 4 data seeds, 2 means of conditions are gone
    assert " of 2 conditions: " in next(variance_sentences(found))


def test_runs_that_cannot_be_used_are_counted(crossed):
    runs = crossed(both)
    for run, status in ((runs[0], "failed"), (runs[5], "stopped")):
        edit(run / "run.json", lambda record, status=status: record.update(status=status))
    edit(runs[6] / "run.json", lambda record: record.update(seed=None))
    found = decompose(runs)
    reasons = ["failed", "stopped", "no seed is recorded"]
    assert (found.components.runs, sorted(reason for _, reason in found.left_out)) == (13, sorted(reasons))
    (said,) = [line for line in variance_sentences(found) if line.startswith("left out: ")]
    assert all(f"1 runs ({reason})" in said for reason in reasons)


def test_refusals(crossed, compare):
    runs = crossed(lambda data, init: {"data": data})
    few = compare(*runs[:3], "--variance")
    assert (few.code, few.out, codes_in(few.err)) == (2, "", ["compare.too-few-runs"])
    assert compare(*runs, "--variance", "--all-pairs").code == 2
    assert codes_in(compare(*runs, "--variance", "--metric", "nothing").err) == ["compare.unknown-metric"]
    for run in runs:
        _set_rate(run, 0.5)
    assert refused(decompose, runs) == ["compare.no-spread"]
