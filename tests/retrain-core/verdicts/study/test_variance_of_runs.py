"""Shares of the variance of runs on disk: by source, and the sentences and refusals of `compare --variance`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.errors import ConfigError
from retrain.verdicts.study.variance import decompose, variance_data, variance_sentences
from tests.kit.edited import edit
from tests.kit.made_runs import MadeRun, write_run
from tests.kit.problems import codes_in


@pytest.fixture
def crossed(tmp_path: Path) -> Callable[..., list[Path]]:
    """`crossed(apart)`: 4 x 4 runs; `apart(data, init)` are their `[training] seeds`, data order decides the rate."""

    def write(apart: Callable[[int, int], dict[str, int]]) -> list[Path]:
        folders = []
        for data, init in np.ndindex(4, 4):
            config = {"training": {"seeds": apart(data, init), "lr": 1e-3}, "eval": {"seed": 0}}
            run = MadeRun(seed=1 + 4 * data + init, steps=4, eval_every=2, config=config)
            folders.append(write_run(tmp_path / f"d{data}i{init}", run))
            _set_rate(folders[-1], 0.5 + 0.08 * data + 0.01 * init + 0.001 * ((data * init) % 3))
        return folders

    return write


def _set_rate(folder: Path, rate: float) -> None:
    """The last held-out rate, and 16 examples x 4 samples of half that were right."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("eval_correct_rate", None)
    rows[-1] |= {"eval_correct_rate": rate}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    fields = {"step": rows[-1]["step"], "set": "held_out", "correct": [True, False] * 2}
    (folder / "eval.jsonl").write_text("".join(json.dumps(fields | {"example": str(n)}) + "\n" for n in range(16)))


def both(data: int, init: int) -> dict[str, int]:
    return {"data": data, "initialisation": init}


def test_the_source_that_decides_has_the_share_and_every_row_its_name(
    crossed: Callable[..., list[Path]], compare_json: Callable[..., Any], compare: Callable[..., Any]
) -> None:
    runs = crossed(both)
    found = decompose(runs)
    assert compare_json(*runs, "--variance") == json.loads(json.dumps(variance_data(found)))
    order, start, rest = found.components.parts
    assert order.variance == pytest.approx((0.5 + 0.08 * np.arange(4)).var(ddof=1), rel=0.05)
    assert order.share > 0.9
    assert (str(found.metric), found.components.runs, found.conditions) == ("eval_correct_rate:final", 16, 1)
    assert (found.components.in_rest, found.components.constant) == (("sampling",), ("evaluation",))
    assert found.noise is not None
    assert found.noise.variance == pytest.approx(0.25 / 3 / 16)  # p (1 - p) / (S - 1) / E
    said = list(variance_sentences(found))
    assert compare(*runs, "--variance").out.splitlines() == said
    names = [("data order", order), ("initialisation", start), ("rest (with sampling)", rest)]
    assert [line.partition(" %")[0] for line in said[1:4]] == [f"{name}: {100 * x.share:.0f}" for name, x in names]
    assert said[4].startswith("never moved: evaluation;")
    assert said[5].endswith("it is a part of the rest.")


def test_sources_that_moved_together_are_named(crossed: Callable[..., list[Path]]) -> None:
    found = decompose(crossed(lambda data, init: {"data": data, "evaluation": data}))
    assert found.components.together == (("data order", "evaluation"),)
    said = list(variance_sentences(found))
    assert "data order and evaluation always moved together: their shares cannot be separated." in said
    assert said[-1].endswith("it is a part of evaluation.")


def test_only_spread_within_runs_of_equal_settings_counts(crossed: Callable[..., list[Path]]) -> None:
    runs = crossed(lambda data, init: {"data": data})
    for run in runs[8:]:
        edit(run / "run.json", lambda record: record["config"]["training"].update(lr=5e-3))
    found = decompose(runs)
    assert found.conditions == 2
    assert [part.df for part in found.components.parts] == [2, 12]  # of 4 data seeds, 2 means of conditions are gone
    assert " of 2 conditions: " in next(variance_sentences(found))


def test_runs_that_cannot_be_used_are_counted(crossed: Callable[..., list[Path]]) -> None:
    runs = crossed(both)
    for run, status in ((runs[0], "failed"), (runs[5], "stopped")):
        edit(run / "run.json", lambda record, status=status: record.update(status=status))
    edit(runs[6] / "run.json", lambda record: record.update(seed=None))
    found = decompose(runs)
    reasons = ["failed", "stopped", "no seed is recorded"]
    assert (found.components.runs, sorted(reason for _, reason in found.left_out)) == (13, sorted(reasons))
    (said,) = [line for line in variance_sentences(found) if line.startswith("left out: ")]
    assert all(f"1 runs ({reason})" in said for reason in reasons)


def test_refusals(crossed: Callable[..., list[Path]], compare: Callable[..., Any]) -> None:
    runs = crossed(lambda data, init: {"data": data})
    few = compare(*runs[:3], "--variance")
    assert (few.code, few.out, codes_in(few.err)) == (2, "", ["compare.too-few-runs"])
    assert compare(*runs, "--variance", "--all-pairs").code == 2
    assert codes_in(compare(*runs, "--variance", "--metric", "nothing").err) == ["compare.unknown-metric"]
    for run in runs:
        _set_rate(run, 0.5)
    with pytest.raises(ConfigError) as caught:
        decompose(runs)
    assert codes_in(caught) == ["compare.no-spread"]
