"""Two single runs, and two checkpoints, over the examples that both answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_rel

from tests.kit.made_runs import MadeRun, write_run


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    made = [
        MadeRun(condition=label, seed=7, steps=20, effect=effect, example_spread=1.0)
        for label, effect in (("a+none", 0.0), ("b+none", 0.2))
    ]
    return [write_run(tmp_path / run.condition[0], run) for run in made]


def last_rates(run: Path) -> np.ndarray:
    rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
    last = max(row["step"] for row in rows)
    return np.array([np.mean(row["correct"]) for row in rows if row["step"] == last])


def test_two_runs_are_compared_by_a_paired_t_test_over_examples(
    runs: list[Path], compare: Any, compare_json: Any
) -> None:
    found, said = compare_json(*runs), compare(*runs).out.splitlines()[0]
    expected = ttest_rel(*(last_rates(run) for run in reversed(runs)))
    two = found["two_runs"]
    assert two["p"] == pytest.approx(expected.pvalue)
    assert two["interval"] == pytest.approx(list(expected.confidence_interval()))
    assert two["difference"] == pytest.approx(found["comparisons"][0]["difference"])
    assert found["comparisons"][0]["verdict"] == "cannot tell"
    assert found["answer"] == said
    assert "these two policies" in said
    assert "nothing about how they were trained" in said


def test_two_seeds_of_one_condition_are_two_policies(tmp_path: Path, compare_json: Any) -> None:
    made = [write_run(tmp_path / str(seed), MadeRun(seed=seed, steps=20, example_spread=1.0)) for seed in (1, 2)]
    found = compare_json(*made)
    assert found["comparisons"] == []
    assert found["two_runs"]["num_examples"] == 64


def test_files_of_two_checkpoints(runs: list[Path], tmp_path: Path, compare: Any, compare_json: Any) -> None:
    files = []
    for run in runs:
        rows = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()]
        last = max(row["step"] for row in rows)
        kept = [{"model": "m", "checkpoint": "final"}, *(row for row in rows if row["step"] == last)]
        files.append(tmp_path / f"{run.name}.jsonl")
        files[-1].write_text("".join(json.dumps(row) + "\n" for row in kept))
    found = compare_json(*files)
    assert (found["p"], found["interval"]) == (
        pytest.approx(compare_json(*runs)["two_runs"]["p"]),
        pytest.approx(compare_json(*runs)["two_runs"]["interval"]),
    )
    assert "these two policies" in compare(*files).out
    refused = compare(*files, "--all-pairs")
    assert refused.code == 2
    files[1].write_text('{"model": "m"}\n{"example": "x", "correct": [true]}\n')
    refused = compare(*files)
    assert (refused.code, "of them the same" in refused.err) == (2, True)
    files[1].write_text('{"model": "m"}\n{"example": "x", "correct": 3}\n')
    assert f"{files[1]}:2" in compare(*files).err
    files[1].write_text("not json\n")
    assert compare(*files).code == 2


def test_samplers_that_differ_are_warned_of_where_they_chose_the_prompts(tmp_path: Path, compare: Any) -> None:
    made = [
        MadeRun(condition=label, seed=seed, steps=20, config={"data": {"sampler": sampler}})
        for label, sampler in (("a+none", "uniform"), ("b+none", "thompson"))
        for seed in range(6)
    ]
    runs = [write_run(tmp_path / f"{run.condition}{run.seed}", run) for run in made]
    warned = compare(*runs, "--metric", "correct_rate").out
    assert "the samplers differ (thompson, uniform), so correct_rate is of other prompts" in warned
    assert "the samplers differ" not in compare(*runs, "--metric", "eval_correct_rate").out
