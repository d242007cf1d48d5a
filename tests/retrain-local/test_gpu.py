from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from retrain.api import SampleRequest, TrainBatch
from retrain_local.backend import LocalBackend

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]


def test_bf16_weights_and_fp32_adapter(make_backend: MakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="retrain"):
        backend = make_backend(devices="gpu:0")
    assert "on cuda:0..." in caplog.text
    assert backend._twins is not None
    kinds = {(p.requires_grad, p.dtype, p.device.type) for p in backend._twins.peft.parameters()}
    assert kinds == {(True, torch.float32, "cuda"), (False, torch.bfloat16, "cuda")}


@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_on_policy_ratio_in_bf16(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, temperature: float
) -> None:
    backend = make_backend(devices="gpu:0", lr=1e-3)
    for step in range(3):
        report = backend.train(roll(backend, requests, step=step, temperature=temperature))
        backend.publish()
        assert abs(report.ratio_mean - 1) < 2e-2
        assert report.gap_mean < 2e-2
        assert report.grad_norm > 0


def test_one_seed_one_run_on_the_gpu(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, tmp_path: Path
) -> None:
    runs = []
    for name in ("first", "again"):
        backend = make_backend(devices="gpu:0")
        tokens = []
        for step in range(3):
            batch = roll(backend, requests, step=step)
            tokens.append([row.tokens_T.tolist() for row in batch.rows])
            backend.train(batch)
            backend.publish()
        (tmp_path / name).mkdir()
        backend.save_adapter(tmp_path / name)
        runs.append((tokens, (tmp_path / name / "adapter_model.safetensors").read_bytes()))
        backend.close()
    assert runs[0] == runs[1]
