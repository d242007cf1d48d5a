"""Where the time went, and the key to try; silent where no key would help."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from retrain.kernel.config import schema
from retrain.kernel.config.plugin_tables import InferenceTable
from retrain.kernel.config.resolved import Config
from retrain.tools import capacity
from retrain.tools.capacity import workload
from retrain.tools.capacity.advice import hint
from retrain.tools.capacity.watch import FEWEST_STEPS, CapacityWatch, Meter


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
