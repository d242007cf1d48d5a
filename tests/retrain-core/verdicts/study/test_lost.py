"""Lost runs at the worst value seen, worst seeds and collapses, on campaigns on disk and on values."""

import shutil

import numpy as np
import pytest

from retrain.records.runs.curves import Direction, Metric
from retrain.records.runs.source import Candidate
from retrain.verdicts.study.comparison import collapsed, collapses, per_seed
from retrain.verdicts.study.safeguards import lost_seeds
from tests.kit.edited import edit_lines, set_if

BASE, OTHER = "grpo+none", "maxrl+none"
RATE = Metric("eval_correct_rate")


@pytest.fixture
def campaign(made, tmp_path):
    """`campaign(effect, states=...)`: two conditions, eight seeds."""

    def make(effect=0.08, **more):
        return made.write_campaign(tmp_path / "c", {BASE: 0.0, OTHER: effect}, seeds=range(8), steps=5, **more)

    return make


def rates_of(content, label):
    (condition,) = [each for each in content["conditions"] if each["condition"] == label]
    return {int(seed): value for seed, value in condition["metrics"]["eval_correct_rate:final"]["values"].items()}


def candidate(seed, state, *, condition="a", problem=""):
    return Candidate(
        name=f"{condition}{seed}", condition=condition, seed=seed, folder=None, state=state, problem=problem
    )


def test_lost_runs_are_at_the_worst_value_of_any_condition(campaign, compare_json, compare):
    folder = campaign(states={(OTHER, 3): "failed", (OTHER, 4): "failed"})
    content = compare_json(folder)
    (found,) = content["comparisons"]
    values = {label: rates_of(content, label) for label in (BASE, OTHER)}
    worst = min(value for each in values.values() for value in each.values())
    diffs = [{**values[OTHER], 3: worst, 4: worst}[seed] - values[BASE][seed] for seed in range(8)]
    assert (found["verdict"], found["seeds"]) == ("better", [0, 1, 2, 5, 6, 7])
    lost = found["lost"]
    assert (lost["baseline_seeds"], lost["condition_seeds"], lost["worst"]) == ([], [3, 4], worst)
    assert sorted(lost["seeds"]) == list(range(8))
    assert per_seed({1: 0.5}, {2: 0.5}, direction=Direction.HIGHER) is None
    assert lost["difference"] == pytest.approx(float(np.mean(diffs)))
    assert (lost["verdict"], lost["survives"]) == ("cannot tell", False)
    shown = compare(folder).out
    assert f"With 2 lost runs of {OTHER} at the worst value seen" in shown
    assert "'better' does not survive the lost runs" in shown


def test_a_condition_that_lost_every_run_is_worse_on_the_second_line_alone(campaign, compare_json):
    (found,) = compare_json(campaign(states={(OTHER, seed): "failed" for seed in range(8)}))["comparisons"]
    assert (found["verdict"], found["difference"], found["per_seed"]) == ("cannot tell", None, None)
    assert (found["lost"]["verdict"], found["lost"]["condition_seeds"]) == ("worse", list(range(8)))


def test_lower_is_better_turns_the_worst_value(campaign, compare_json):
    folder = campaign(states={(BASE, 3): "failed"})
    content = compare_json(folder, "--lower")
    (found,) = content["comparisons"]
    everything = [value for label in (BASE, OTHER) for value in rates_of(content, label).values()]
    assert found["lost"]["worst"] == max(everything)
    assert found["per_seed"]["worst_condition"] == max(rates_of(content, OTHER).values())
    assert found["per_seed"]["wins"] == 0  # by this measure it is worse everywhere


def test_a_run_that_goes_on_or_has_not_begun_is_not_lost():
    states = {0: "done", 1: "running", 2: "stale", 3: "not started", 4: "failed", 5: "dead", 6: "interrupted"}
    runs = [candidate(seed, state) for seed, state in states.items()]
    runs += [candidate(7, "done"), candidate(8, "unreadable", problem="damaged"), candidate(None, "failed")]
    runs += [candidate(4, "failed"), candidate(0, "failed", condition="b"), candidate(9, "done", problem="damaged")]
    values = {"a": {0: 0.5}, "b": {}}
    assert lost_seeds(runs, values, is_cut=False) == {"a": (4, 5, 6, 7, 8, 9), "b": (0,)}
    assert lost_seeds(runs, values, is_cut=True)["a"] == (4, 5, 6, 8, 9)  # 7 was done before the budget


def test_a_done_run_without_a_number_is_lost(campaign, compare_json):
    folder = campaign()
    edit_lines(folder / f"runs/{OTHER}_s5/metrics.jsonl", set_if("eval_correct_rate", lambda _: None))
    (found,) = compare_json(folder, "--metric", "eval_correct_rate")["comparisons"]
    assert found["lost"]["condition_seeds"] == [5]


def test_worst_seeds_and_wins_are_those_of_the_files(campaign, compare_json, compare):
    folder = campaign(effect=0.02)
    shutil.rmtree(folder / "runs" / f"{OTHER}_s0")
    content = compare_json(folder)
    seeds = content["comparisons"][0]["per_seed"]
    base, other = rates_of(content, BASE), rates_of(content, OTHER)
    assert (seeds["worst_baseline"], seeds["worst_condition"]) == (min(base.values()), min(other.values()))
    assert seeds["baseline"] == [base[seed] for seed in range(1, 8)]
    assert seeds["wins"] == sum(other[seed] > base[seed] for seed in range(1, 8))
    assert seeds["ties"] == sum(other[seed] == base[seed] for seed in range(1, 8))
    assert f"Better in {seeds['wins']} of 7 seeds" in compare(folder).out


def test_a_collapse_is_named_with_its_seed_and_not_for_a_cost(campaign, compare, compare_json):
    values = {"a": dict(enumerate([0.8, 0.81, 0.79, 0.82, 0.1])), "b": dict.fromkeys(range(5), 0.8)}
    (found,) = collapses(values, RATE, direction=Direction.HIGHER)
    assert (found.condition, found.seeds, found.worst, found.median) == ("a", (4,), 0.1, 0.8)
    assert not collapses(values, RATE, direction=Direction.LOWER)
    close = {"a": dict(enumerate([0.8, 0.8, 0.8, 0.76]))}  # a rate must be 5 pp below, a reward need not
    assert not collapses(close, RATE, direction=Direction.HIGHER)
    (found,) = collapses(close, Metric("eval_mean_reward"), direction=Direction.HIGHER)
    assert (found.seeds, found.worst, found.median) == ((3,), 0.76, 0.8)
    folder = campaign()
    edit_lines(folder / f"runs/{OTHER}_s2/metrics.jsonl", set_if("eval_correct_rate", lambda _: 0.05))
    assert [each["seeds"] for each in compare_json(folder)["collapses"]] == [[2]]
    assert f"{OTHER}: seed 2 lies far from the others (worst 5.0%, median" in compare(folder).out


GOOD = np.array([0.80, 0.81, 0.79, 0.82, 0.80, 0.78, 0.81, 0.80])


def with_value(values_N, *fallen):
    return np.concatenate([fallen, values_N[len(fallen) :]])


def test_collapses_need_a_wide_gap_against_the_spread_of_all_conditions():
    values = [GOOD, with_value(GOOD, 0.1), with_value(GOOD, 0.1, 0.2), with_value(GOOD, 0.99)]
    assert collapsed(values) == [[], [0], [0, 1], []]
    # Rates of close seeds: six standard deviations may be two examples out of a hundred.
    values_N = with_value(GOOD, 0.72)
    assert collapsed([values_N]) == [[0]]
    assert collapsed([values_N], least_gap=0.09) == [[]]
    assert collapsed([np.array([0.8] * 7 + [0.1])], least_gap=0.05) == [[7]]  # without any spread
    assert collapsed([np.array([0.8] * 7 + [0.8 - 1e-12])]) == [[]]
    close_N = np.array([0.800, 0.801, 0.799, 0.800, 0.790])
    assert collapsed([close_N]) == [[4]]
    assert collapsed([close_N, np.linspace(0.6, 0.9, 8)]) == [[], []]
    assert collapsed([np.array([0.8, 0.8, 0.1]), np.zeros(0)]) == [[], []]
    assert collapsed([np.zeros(0), with_value(GOOD, 0.1)]) == [[], [0]]


def test_far_is_five_robust_standard_deviations_and_more_than_the_least_gap():
    spread = [2.0, 1.0, 1.0, 0.0, -1.0, -1.0]  # with a low value: median 0, median absolute deviation 1
    found = {low: collapsed([np.array([*spread, -low])]) for low in (5 * 1.4826 - 0.01, 5 * 1.4826 + 0.01)}
    assert list(found.values()) == [[[]], [[6]]]
    assert [collapsed([np.array([1.0] * 3 + [low])], least_gap=0.25) for low in (0.75, 0.74)] == [[[]], [[3]]]
