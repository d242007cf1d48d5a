"""What a run measures: peaks by phase, a median of a bounded list, and the key to try for the phase that dominates."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.tools import capacity
from retrain.tools.capacity import workload
from retrain.tools.capacity.advice import hint
from retrain.tools.capacity.watch import FEWEST_STEPS, RECENT_STEPS, CapacityWatch, Meter


def configured(engine: str = "pytorch", backend: str = "local", **options: Any) -> Config:
    tables = {
        "backend": schema.BackendTable(backend=backend, devices="gpu:0", options=options),
        "inference": InferenceTable(engine=engine),
    }
    return Config(tables=tables)


@pytest.mark.parametrize(
    ("shares", "config", "has_gpu", "said"),
    [
        ({"sample": 0.78}, configured(), True, "sampling 78% with engine = 'pytorch': try [inference] kv_cache_dtype"),
        ({"sample": 0.78}, configured(), False, ""),
        ({"sample": 0.78}, configured("vllm"), False, "try more servers in [inference] url"),
        ({"sample": 0.59, "train": 0.41}, configured(), True, ""),
        ({"sample": 0.9}, configured(backend="tinker"), True, ""),
        ({"train": 0.7}, configured(), True, ""),
        ({"score": 0.31, "sample": 0.6}, configured(backend="tinker"), False, "waiting for scores 31%: try [scoring]"),
        ({}, configured(), True, ""),
    ],
)
def test_the_key_of_the_phase_that_dominates(
    shares: dict[str, float], config: Config, has_gpu: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workload, "gpu_memory_bytes", lambda: (2**34,) * has_gpu)
    text = hint(shares, config)
    assert said in text
    assert bool(text) == bool(said)


def test_shares_are_of_the_whole_step_and_without_the_first() -> None:
    meter = Meter()
    assert meter.shares == {}
    meter.step(100.0, {"sample": 100.0})
    assert meter.shares["sample"] == 1.0
    meter.step(10.0, {"sample": 2.0, "train": 7.0})
    meter.step(10.0, {"sample": 4.0, "train": 5.0})
    assert meter.shares == {"sample": 0.3, "score": 0.0, "train": 0.6}
    assert meter.measured()["time_shares"] == meter.shares


@pytest.mark.parametrize("steps", [FEWEST_STEPS - 1, FEWEST_STEPS])
def test_a_run_says_it_once_at_its_end(steps: int, caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    run: Any = SimpleNamespace(config=configured("vllm"), folder=tmp_path)
    context: Any = SimpleNamespace(plugins=None)
    watch, other = capacity.retrain_watch_run(context), capacity.retrain_watch_run(context)
    assert isinstance(watch, CapacityWatch)
    assert isinstance(other, CapacityWatch)
    watch.retrain_run_start()
    other.retrain_run_start()  # of another run in this process, which keeps its own time
    for _ in range(steps):
        watch.retrain_step_end({"step_time_s": 1.0, "sample_time_s": 0.8, "score_time_s": 0.0, "train_time_s": 0.1})
    with caplog.at_level(logging.INFO, logger="retrain"):
        watch.retrain_run_end(run)
        other.retrain_run_end(run)
    said = [record.getMessage() for record in caplog.records if record.getMessage().startswith("Time: ")]
    assert len(said) == (steps == FEWEST_STEPS)
    assert not said or "sampling 80% with engine = 'vllm'" in said[0]


BLOCK = 200 * 2**20


# In a process of its own: one that has run other tests would have to exceed their peak, which is gigabytes.
PEAKS = """
import json, sys
import numpy as np
from retrain.tools.capacity.watch import Meter, peak_bytes

meter = Meter()
first = peak_bytes()
meter.enter("sampling")
block = np.ones(peak_bytes() + int(sys.argv[1]), dtype=np.uint8)
meter.enter("training")
del block
meter.enter("recording")
json.dump(meter.measured() | {"first_peak": first}, sys.stdout, allow_nan=False)
"""


def test_a_phase_is_charged_with_the_peak_that_it_reached() -> None:
    parent = np.ones(2 * BLOCK, dtype=np.uint8)  # is not charged to its child
    command = [sys.executable, "-c", PEAKS, str(BLOCK)]
    measured = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert 2**20 < measured["memory_at_start_bytes"] <= measured["first_peak"] < len(parent)
    phases = measured["peak_memory_bytes_by_phase"]
    assert phases["sampling"] >= phases.get("start", 0) + BLOCK // 2
    assert measured["peak_memory_bytes"] >= phases["sampling"]
    assert "training" not in phases
    assert "median_step_time_s" not in measured


def test_the_first_step_is_not_in_the_median_and_old_ones_are_forgotten() -> None:
    meter = Meter()
    meter.step(100.0)
    assert meter.measured()["median_step_time_s"] == 100.0
    meter.step(1.0)
    meter.step(3.0)
    assert meter.measured()["median_step_time_s"] == 2.0
    for _ in range(3 * RECENT_STEPS):
        meter.step(5.0)
    assert meter.measured()["steps"] == RECENT_STEPS
    meter.saw(20, 7)
    meter.saw(10, 9)
    measured = meter.measured()
    assert (measured["longest_prompt_tokens"], measured["longest_completion_tokens"]) == (20, 9)
