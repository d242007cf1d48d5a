"""`retrain compare --variance` on runs on disk: shares, what moved together, and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest


@pytest.fixture
def crossed(made: ModuleType, tmp_path: Path) -> Callable[..., list[Path]]:
    """`crossed(apart)`: 4 x 4 runs; `apart(data, init)` are their `[training] seeds`, data order decides the rate."""

    def write(apart: Callable[[int, int], dict[str, int]], **more: Any) -> list[Path]:
        folders = []
        for data in range(4):
            for init in range(4):
                training = {"seeds": apart(data, init), "lr": 1e-3, **more}
                run = made.MadeRun(
                    seed=1 + 4 * data + init, steps=4, eval_every=2, config={"training": training, "eval": {"seed": 0}}
                )
                folder = made.write_run(tmp_path / f"d{data}i{init}", run)
                _set_rate(folder, 0.5 + 0.08 * data + 0.01 * init + 0.001 * ((data * init) % 3))
                folders.append(folder)
        return folders

    return write


def _set_rate(folder: Path, rate: float) -> None:
    """The last held-out rate, and 16 examples x 4 samples of half that were right."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("eval_correct_rate", None)
    rows[-1] |= {"eval_correct_rate": rate}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        {"step": rows[-1]["step"], "set": "held_out", "example": str(n), "correct": [True, False] * 2}
        for n in range(16)
    ]
    (folder / "eval.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_the_source_that_decides_has_the_share(
    crossed: Callable[..., list[Path]], compare_json: Callable[..., Any], compare: Callable[..., Any]
) -> None:
    runs = crossed(lambda data, init: {"data": data, "initialisation": init})
    found = compare_json(*runs, "--variance")
    parts = {part["name"]: part for part in found["parts"]}
    assert list(parts) == ["data order", "initialisation", "rest"]
    rates = 0.5 + 0.08 * np.arange(4)
    assert parts["data order"]["variance"] == pytest.approx(rates.var(ddof=1), rel=0.05)
    assert parts["data order"]["share"] > 0.9
    assert (found["metric"], found["runs"], found["conditions"]) == ("eval_correct_rate:final", 16, 1)
    assert (found["in_rest"], found["constant"]) == (["sampling"], ["evaluation"])
    assert found["noise"]["variance"] == pytest.approx(0.25 / 3 / 16)  # p (1 - p) / (S - 1) / E
    told = compare(*runs, "--variance").out
    assert "data order: 9" in told
    assert "never moved: evaluation;" in told
    assert "rest (with sampling)" in told
    assert "it is a part of the rest" in told


def test_sources_that_moved_together_are_named(
    crossed: Callable[..., list[Path]], compare_json: Callable[..., Any], compare: Callable[..., Any]
) -> None:
    runs = crossed(lambda data, init: {"data": data, "evaluation": data})
    assert compare_json(*runs, "--variance")["together"] == [["data order", "evaluation"]]
    assert "data order and evaluation always moved together" in compare(*runs, "--variance").out


def test_runs_that_differ_in_more_than_seeds_are_no_levels_of_one_source(
    crossed: Callable[..., list[Path]], compare_json: Callable[..., Any]
) -> None:
    runs = crossed(lambda data, init: {"data": data})
    for run in runs[8:]:
        record = json.loads((run / "run.json").read_text())
        record["config"]["training"]["lr"] = 5e-3
        (run / "run.json").write_text(json.dumps(record))
    found = compare_json(*runs, "--variance")
    assert found["conditions"] == 2
    assert [part["df"] for part in found["parts"]] == [2, 12]  # of 4 data seeds, 2 means of conditions are gone


def test_runs_that_cannot_be_used_are_counted(
    crossed: Callable[..., list[Path]], compare_json: Callable[..., Any], compare: Callable[..., Any]
) -> None:
    runs = crossed(lambda data, init: {"data": data, "initialisation": init})
    for run, status in ((runs[0], "failed"), (runs[5], "stopped")):
        record = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(record | {"status": status}))
    found = compare_json(*runs, "--variance")
    assert (found["runs"], [each["reason"] for each in found["left_out"]]) == (14, ["failed", "stopped"])
    assert "left out: 1 runs (failed), 1 runs (stopped)" in compare(*runs, "--variance").out


def test_refusals(crossed: Callable[..., list[Path]], compare: Callable[..., Any]) -> None:
    runs = crossed(lambda data, init: {"data": data})
    few = compare(*runs[:3], "--variance")
    assert (few.code, few.out) == (2, "")
    assert "3 finished runs are too few" in few.err
    assert "goes with --metric and --json only" in compare(*runs, "--variance", "--all-pairs").err
    alike = compare(*runs, "--variance", "--metric", "nothing")
    assert alike.code == 2
    for run in runs:
        _set_rate(run, 0.5)
    assert "no spread is left" in compare(*runs, "--variance").err
