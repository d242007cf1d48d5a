"""Two processes against one: the same samples, the same gradient, the same files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from retrain.api import BackendError, ConfigError, Determinism, SamplesAhead, SamplingParams, TrainBatch
from retrain_local.model.checkpoint import OPTIMIZER_FILE
from tests.kit.local_backend import Local
from tests.kit.sampled_rows import sampled_rows
from tests.kit.shared import first_or_long

pytestmark = pytest.mark.slow
PARAMS = SamplingParams(max_tokens=16, temperature=1.0)
MakeRanked = Callable[..., Any]
MODES: dict[str, dict[str, Any]] = {"replicate": {}, "fsdp": {"model": {"lora_rank": 0}}}


def saved(backend: Any, folder: Path) -> dict[str, dict[str, np.ndarray]]:
    folder.mkdir()
    backend.save(folder)
    return {file.name: load_file(file) for file in folder.glob("*.safetensors")}


def check_close(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], within: float) -> None:
    """All tensors together differ by less than that, relative to their norm."""
    assert found.keys() == wanted.keys()
    flat, other = (np.concatenate([each[name].ravel() for name in sorted(wanted)]) for each in (wanted, found))
    assert np.linalg.norm(other - flat) / np.linalg.norm(flat) < within


@pytest.mark.parametrize("parallel", first_or_long(MODES))
def test_two_processes_are_one(parallel: str, make_ranked: MakeRanked, local: Local, tmp_path: Path) -> None:
    alone, both = make_ranked(1, **MODES[parallel]), make_ranked(2, parallel, **MODES[parallel])
    assert not isinstance(both, SamplesAhead)
    assert both.capabilities.determinism is Determinism.SAME_MACHINE
    delivered = set[tuple[int, int]]()
    for step in range(2):
        ours = alone.sample(local.requests, PARAMS)
        theirs = both.sample(local.requests, PARAMS, lambda group, place, _: delivered.add((group, place)))
        for one, other in zip(ours, theirs, strict=True):
            assert [s.tokens_T.tolist() for s in one] == [s.tokens_T.tolist() for s in other]
            assert {s.policy_version for s in other} == {step}
            for s, t in zip(one, other, strict=True):
                np.testing.assert_allclose(s.logprobs_T, t.logprobs_T, atol=1e-3 if step else 1e-4)
        assert len(delivered) == sum(len(group) for group in ours)
        rows = sampled_rows(local.requests, ours, np.random.default_rng(step))
        batch = TrainBatch(step=step, rows=rows, temperature=1.0)
        mine, report = alone.train(batch), both.train(batch)
        assert report.grad_norm == pytest.approx(mine.grad_norm, rel=1e-6 if step == 0 else 1e-3)
        assert (report.num_tokens, report.clip_fraction) == (mine.num_tokens, mine.clip_fraction)
        if step == 0:  # the first moment is a tenth of the gradient
            files, own = saved(both, tmp_path / "both"), saved(alone, tmp_path / "alone")
            assert sorted(p.name for p in (tmp_path / "both").iterdir()) == sorted(
                p.name for p in (tmp_path / "alone").iterdir()
            )
            moments, mine = (
                {k: v for k, v in f[OPTIMIZER_FILE].items() if k.endswith("exp_avg")} for f in (files, own)
            )
            check_close(moments, mine, 1e-6)
        assert alone.publish() == both.publish() == step + 1
        for one, other in zip(alone.logprobs(rows, 1.0), both.logprobs(rows, 1.0), strict=True):
            np.testing.assert_allclose(other, one, atol=5e-3)  # Adam makes steps of lr of the smallest gradients
    assert both.metrics()["engine_live_rows_mean"] > 0


@pytest.mark.long
@pytest.mark.parametrize("parallel", MODES)
def test_a_checkpoint_continues_on_another_number_of_ranks(
    parallel: str, make_ranked: MakeRanked, local: Local, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    two = make_ranked(2, parallel, **MODES[parallel])
    rows = sampled_rows(local.requests, two.sample(local.requests, PARAMS), np.random.default_rng(0))
    few = TrainBatch(step=0, rows=rows[:1], temperature=1.0)  # one of two ranks has no row
    two.train(few)
    before = saved(two, tmp_path / "two")
    one = make_ranked(1, **MODES[parallel])
    one.load(tmp_path / "two")
    assert "This checkpoint is of 2 ranks, and the run continues on 1" in caplog.text
    assert saved(one, tmp_path / "one").keys() == before.keys()
    for name, tensors in before.items():
        again = load_file(tmp_path / "one" / name)
        assert all(np.array_equal(again[key], tensor) for key, tensor in tensors.items())
    two.load(tmp_path / "one")
    assert two.publish() == 1
    batch = replace(few, step=1, rows=rows)
    assert two.train(batch).grad_norm == pytest.approx(one.train(batch).grad_norm, rel=1e-5)


@pytest.mark.long
def test_a_model_that_another_rank_cannot_load_ends_the_start(make_ranked: MakeRanked) -> None:
    with pytest.raises((ConfigError, BackendError)):
        make_ranked(2, inference={"attention_kernel": "flash"})
