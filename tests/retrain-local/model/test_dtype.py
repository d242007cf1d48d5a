"""`[model] dtype`: bf16 on a CPU in sampling and training, and refused with a measurement where it is emulated."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from retrain.api import ConfigError
from retrain_local.factory import create_backend
from retrain_local.model import load as dtypes
from tests.kit.local_backend import Local

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_is_fp32_on_a_cpu_and_bf16_on_a_gpu(local: Local) -> None:
    auto, fp32, bf16 = (local.context(dtype=name).config for name in ("auto", "fp32", "bf16"))
    assert dtypes.trained_dtype(auto, CPU) == torch.float32
    assert dtypes.trained_dtype(auto, GPU) == torch.bfloat16
    assert dtypes.trained_dtype(fp32, GPU) == torch.float32
    assert dtypes.trained_dtype(bf16, GPU) == torch.bfloat16
    assert all(0 < dtypes.product_s(dtype) < 10 for dtype in dtypes.DTYPES.values())


def test_bf16_that_a_cpu_emulates_is_refused_with_what_was_measured(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    def seconds(bf16_s: float) -> Callable[[torch.dtype], float]:
        return {torch.float32: 0.0005, torch.bfloat16: bf16_s}.__getitem__

    monkeypatch.setattr(dtypes, "has_instructions", lambda: False)
    monkeypatch.setattr(dtypes, "product_s", seconds(0.0004))
    assert dtypes.bf16_refusal() is None
    monkeypatch.setattr(dtypes, "product_s", seconds(0.00232))
    with pytest.raises(ConfigError) as caught:
        create_backend(local.context(dtype="bf16"))
    (problem,) = caught.value.problems
    assert problem.where == "[model] dtype (default)"
    assert problem.why == "it emulates bf16: a product of 128 x 512 x 512 takes 2.32 ms in bf16 and 0.50 ms in fp32"
    assert dtypes.trained_dtype(local.context(dtype="fp32").config, CPU) == torch.float32
    monkeypatch.setattr(dtypes, "has_instructions", lambda: True)
    assert dtypes.trained_dtype(local.context(dtype="bf16").config, CPU) == torch.bfloat16


def test_bf16_on_a_cpu_samples_and_trains_one_policy(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dtypes, "has_instructions", lambda: True)  # whatever the speed of bf16 here
    backend = create_backend(local.context(dtype="bf16"))
    pair, trainer = backend._open()
    assert pair.trained.dtype == pair.sampler.dtype == torch.bfloat16
    assert {p.dtype for p in trainer.parameters.values()} == {torch.float32}
    gaps = []
    for step in range(2):
        batch = local.roll(backend, step=step)
        logprobs = backend.logprobs(batch.rows, 1.0)
        gaps += [
            np.abs(found_T - row.logprobs_T)[row.action_T] for found_T, row in zip(logprobs, batch.rows, strict=True)
        ]
        backend.train(batch)
        backend.publish()
    moments = [moment for state in trainer.optimizer.state.values() for moment in state.values()]
    assert {moment.dtype for moment in moments} == {torch.float32}
    gap = np.concatenate(gaps)
    assert gap.mean() <= 0.05
    assert np.quantile(gap, 0.99) <= 0.25
