"""The local backend on a CUDA device: the same policy on both sides, in every mode, and the same run from one seed."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.api import Sample, SamplingParams
from retrain_local.attention.packed import PaddedAttend
from retrain_local.backend import LocalBackend
from retrain_local.sampling.engine import PytorchEngine
from tests.kit.local_backend import Local, saved
from tests.kit.local_engines import all_same
from tests.kit.plain_path import distance, gradient

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device")]
PARAMS = SamplingParams(max_tokens=60, temperature=0.9, entropy=True)
MODES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "flash": {"inference": {"attention_kernel": "flash"}},
    "triton": {"inference": {"attention_kernel": "triton"}},
    "own prompts": {"inference": {"prefix_caching": False}},
    "packs of 64 tokens": {"options": {"micro_batch_tokens": 64}},
    "recomputed": {"options": {"gradient_checkpointing": "on"}},
    "split": {"devices": "gpu:0,gpu:0"},
}


def engine_of(backend: LocalBackend) -> PytorchEngine:
    engine = backend._engine
    assert isinstance(engine, PytorchEngine)
    return engine


def test_weights_are_bf16_and_no_kernel_proves_wrong(local: Local, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="retrain"):
        backend = local.make(devices="gpu:0")
    assert "on cuda:0..." in caplog.text
    assert "is not used on" not in caplog.text
    assert engine_of(backend)._kernels.paged is not None
    assert backend._pair is not None
    assert backend._pair.trained.dtype is backend._pair.sampler.dtype is torch.bfloat16
    kinds = {(p.requires_grad, p.dtype, p.device.type) for p in backend._pair.parameters.values()}
    assert kinds == {(True, torch.float32, "cuda")}


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_on_policy_ratio_in_bf16(local: Local, mode: dict[str, Any], temperature: float) -> None:
    backend = local.make(**({"devices": "gpu:0", "lr": 1e-3} | mode))
    for step in range(3):
        report = backend.train(local.roll(backend, step=step, temperature=temperature))
        backend.publish()
        assert abs(report.ratio_mean - 1) < 2e-2
        assert report.gap_mean < 2e-2
        assert report.grad_norm > 0


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_the_gradient_is_that_of_plain_attention(local: Local, mode: dict[str, Any]) -> None:
    """The same batch through the kernels of this mode and through padded rows in plain PyTorch."""
    plain = local.make(devices="gpu:0")
    assert plain._trainer is not None
    plain._trainer._attend = PaddedAttend
    batch = local.roll(plain)
    backend = local.make(**({"devices": "gpu:0"} | mode))
    assert distance(gradient(backend, batch), gradient(plain, batch)) < 2e-2


@pytest.mark.parametrize("quantised", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_quantised_sampling_stays_near(local: Local, quantised: dict[str, str]) -> None:
    if "fp8" in quantised.values() and torch.cuda.get_device_capability(0) < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    backend = local.make(devices="gpu:0", inference=quantised)
    report = backend.train(local.roll(backend))
    assert 0 < report.gap_mean < 0.2


def drawn(backend: LocalBackend, local: Local) -> list[Sample]:
    return [sample for group in backend.sample(local.requests, PARAMS) for sample in group]


def test_recorded_steps_draw_what_plain_steps_draw(local: Local) -> None:
    recorded, plain = local.make(devices="gpu:0"), local.make(devices="gpu:0")
    engine_of(plain)._graphs._records = False
    for step in range(2):
        all_same([drawn(recorded, local)], [drawn(plain, local)], atol=2e-2)
        batch = local.roll(plain, step=step)
        for backend in (recorded, plain):
            backend.train(batch)
            backend.publish()
    assert len(engine_of(recorded)._graphs) > 0
    assert len(engine_of(plain)._graphs) == 0


def test_room_made_for_training_changes_nothing(local: Local) -> None:
    backend = local.make(devices="gpu:0")
    before = drawn(backend, local)
    held = torch.cuda.memory_reserved()
    engine_of(backend).free_cache()
    assert torch.cuda.memory_reserved() < held
    for one, other in zip(drawn(backend, local), before, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        assert one.logprobs_T.tolist() == other.logprobs_T.tolist()


def test_decoding_waits_for_the_gpu_once_per_segment(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    backend = local.make(devices="gpu:0")
    drawn(backend, local)  # recordings are made
    run = engine_of(backend)._graphs.run

    def watched(*given: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine_of(backend)._graphs, "run", watched)
    drawn(backend, local)


def test_one_seed_one_run_on_the_gpu(local: Local, tmp_path: Path) -> None:
    runs = []
    for name in ("first", "again"):
        backend = local.make(devices="gpu:0")
        tokens = []
        for step in range(3):
            batch = local.roll(backend, step=step)
            tokens.append([row.tokens_T.tolist() for row in batch.rows])
            backend.train(batch)
            backend.publish()
        folder = saved(tmp_path / name, backend.save_adapter)
        runs.append((tokens, (folder / "adapter_model.safetensors").read_bytes()))
        backend.close()
    assert runs[0] == runs[1]
