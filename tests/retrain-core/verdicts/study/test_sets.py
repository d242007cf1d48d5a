"""`--sets`: several evaluation sets together, on campaigns on disk."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from retrain.records.runs.curves import Metric, parse_metric
from retrain.records.runs.source import Candidate
from retrain.verdicts.study.sets import set_metrics

EFFECTS = {"grpo+none": 0.0, "maxrl+none": 0.1}
Compare = Callable[..., dict[str, Any]]


@pytest.fixture
def campaign(made: Any, tmp_path: Path) -> Callable[..., Path]:
    """A campaign whose runs have the sets `hard` (half the held-out rate) and `short` (2 pp more)."""

    def make(*, seeds: Any = range(9), sets: tuple[str, ...] = ("hard", "short"), missing: str = "") -> Path:
        folder: Path = made.write_campaign(
            tmp_path, EFFECTS, seeds=seeds, steps=5, config={"eval": {"sets": {name: {} for name in sets}}}
        )
        for run in (folder / "runs").iterdir():
            lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
            for line in lines:
                if "eval_correct_rate" in line:
                    rate = line["eval_correct_rate"]
                    line |= {"eval_hard_correct_rate": rate / 2} if run.name != missing else {}
                    line |= {"eval_short_correct_rate": min(1.0, rate + 0.02)}
            (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")
        return folder

    return make


def test_the_family_is_sets_and_their_mean_times_conditions(campaign: Any, compare_json: Compare, compare: Any) -> None:
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


def test_aggregates_are_those_of_the_values(campaign: Any, compare_json: Compare) -> None:
    content = compare_json(campaign(), "--sets")
    view = content["sets"]
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


def test_a_run_that_lacks_a_set_is_left_out_of_the_mean_alone(campaign: Any, compare_json: Compare) -> None:
    view = compare_json(campaign(missing="maxrl+none_s4"), "--sets")["sets"]
    (pair,) = view["comparisons"]
    assert [len(each["seeds"]) for each in (pair["overall"], *pair["per_set"])] == [8, 9, 8, 9]
    assert 4 not in view["conditions"][1]["seeds"]


def test_few_seeds_have_no_limit_rather_than_a_verdict(campaign: Any, compare: Any, compare_json: Compare) -> None:
    folder = campaign(seeds=range(6))
    content = compare_json(folder, "--sets")
    assert content["comparisons"][0]["verdict"] == "better"
    (pair,) = content["sets"]["comparisons"]
    assert (pair["overall"]["verdict"], pair["overall"]["interval"]) == ("cannot tell", [None, None])
    assert "8 seeds are the least for a verdict in it" in compare(folder, "--sets").out


def test_one_seed_has_numbers_without_intervals(campaign: Any, compare_json: Compare) -> None:
    first = compare_json(campaign(seeds=[1]), "--sets")["sets"]["conditions"][0]
    assert (first["mean"]["interval"], first["iqm"]["interval"]) == (None, None)


def test_runs_with_a_single_set_are_refused(made: Any, tmp_path: Path, compare: Any) -> None:
    result = compare(made.write_campaign(tmp_path, EFFECTS, seeds=range(3), steps=5), "--sets")
    assert result.code == 2
    assert "--sets: the runs were evaluated on held_out: there is nothing to combine" in result.err


@pytest.mark.parametrize(
    ("requested", "want"),
    [
        (None, "eval_correct_rate:final eval_correct_correct_rate:final eval_hard_correct_rate:final"),
        (
            "eval_hard_mean_reward:best",
            "eval_mean_reward:best eval_correct_mean_reward:best eval_hard_mean_reward:best",
        ),
        ("eval_pass_at_4", "eval_pass_at_4:final eval_correct_pass_at_4:final eval_hard_pass_at_4:final"),
    ],
)
def test_the_measure_is_asked_of_every_set(requested: str | None, want: str) -> None:
    """Also where a set is called as a measure begins."""
    record = {"config": {"eval": {"sets": {"correct": {}, "hard": {}}}}}
    run = Candidate(name="a", condition="a", seed=1, folder=None, state="done", record=record)
    broken = Candidate(name="b", condition="a", seed=2, folder=None, state="done", record={"config": {"eval": [1]}})
    metric = parse_metric(requested, where="test") if requested else None
    found = set_metrics([run, broken], metric)
    assert list(found) == ["held_out", "correct", "hard"]
    assert " ".join(map(str, found.values())) == want
    assert Metric("eval_hard_pass_at_4").is_rate
