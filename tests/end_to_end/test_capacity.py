"""Predicted next to measured: by `retrain capacity` before the run, in `run.json`, and in the next forecast."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.running import SMALL, retrain, tiny


@pytest.mark.long
def test_a_run_keeps_what_was_measured_and_the_next_forecast_knows_it(tmp_path: Path) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    predicted = json.loads(retrain("capacity", "--json", *SMALL, "--log-dir", "logs/a", cwd=tmp_path).out)
    tiny(*SMALL, "--log-dir", "logs/a", cwd=tmp_path)
    measured = json.loads((tmp_path / "logs/a/run.json").read_text())["capacity"]["measured"]
    assert predicted["prompt_tokens_are_assumed"]
    assert 0.5 < predicted["peak_memory_bytes"] / measured["peak_memory_bytes"] < 2.0
    assert measured["steps"] == 3
    assert measured["median_step_time_s"] > 0.0
    assert measured["peak_memory_bytes"] >= measured["memory_at_start_bytes"] > 0
    assert measured["longest_prompt_tokens"] < 64

    explained = json.loads(retrain("explain", "--json", *SMALL, cwd=tmp_path).out)
    assert " in " in explained["peak_memory"]
    assert "as before here" in explained["wall_time"]

    second = json.loads(retrain("capacity", "--json", *SMALL, "--log-dir", "logs/b", cwd=tmp_path).out)
    assert not second["prompt_tokens_are_assumed"]
    assert second["prompt_tokens"] == measured["longest_prompt_tokens"]
    assert second["median_step_time_s"] == measured["median_step_time_s"]


def test_a_model_of_unknown_size_is_said_to_be_unknown(tmp_path: Path) -> None:
    explained = retrain("explain", "--model", "nobody/nothing", cwd=tmp_path)
    assert explained.code == 0
    assert "peak_memory" in explained.out
    assert "unknown: config.json of 'nobody/nothing' is not in the hub's cache" in explained.out
