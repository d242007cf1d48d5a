"""The local backend on a CUDA device: the same policy on both sides, in every mode, and the same run from one seed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import Sample, SampleRequest, SamplingParams, TrainBatch
from retrain_local.backend import LocalBackend
from retrain_local.sampling.engine import PytorchEngine

MakeBackend = Callable[..., LocalBackend]
Roll = Callable[..., TrainBatch]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA device"),
]
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


def test_bf16_weights_and_fp32_adapter(make_backend: MakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="retrain"):
        backend = make_backend(devices="gpu:0")
    assert "on cuda:0..." in caplog.text
    assert backend._pair is not None
    assert backend._pair.trained.dtype is backend._pair.sampler.dtype is torch.bfloat16
    kinds = {(p.requires_grad, p.dtype, p.device.type) for p in backend._pair.parameters.values()}
    assert kinds == {(True, torch.float32, "cuda")}


def test_no_kernel_proves_wrong_here(make_backend: MakeBackend, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="retrain"):
        backend = make_backend(devices="gpu:0")
    assert "is not used on" not in caplog.text
    assert engine_of(backend)._kernels.paged is not None


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_on_policy_ratio_in_bf16(
    make_backend: MakeBackend,
    requests: Sequence[SampleRequest],
    roll: Roll,
    mode: dict[str, Any],
    temperature: float,
) -> None:
    backend = make_backend(**({"devices": "gpu:0", "lr": 1e-3} | mode))
    for step in range(3):
        report = backend.train(roll(backend, requests, step=step, temperature=temperature))
        backend.publish()
        assert abs(report.ratio_mean - 1) < 2e-2
        assert report.gap_mean < 2e-2
        assert report.grad_norm > 0


@pytest.mark.parametrize("mode", MODES.values(), ids=MODES.keys())
def test_the_gradient_is_that_of_plain_attention(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, mode: dict[str, Any]
) -> None:
    """The same batch through the kernels of this mode and through padded rows in plain PyTorch."""
    from retrain_local.attention.packed import PaddedAttend

    plain = make_backend(devices="gpu:0")
    assert plain._trainer is not None
    plain._trainer._attend = PaddedAttend
    batch = roll(plain, requests)
    backend = make_backend(**({"devices": "gpu:0"} | mode))
    found = []
    for each in (plain, backend):
        assert each._trainer is not None
        each._trainer.accumulate(batch)
        gradients = {name: p.grad for name, p in each._trainer.parameters.items() if p.grad is not None}
        found.append(torch.cat([gradient.flatten().double() for _, gradient in sorted(gradients.items())]))
    assert float((found[0] - found[1]).norm() / found[0].norm()) < 2e-2


@pytest.mark.parametrize("quantised", [{"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "fp8"}])
def test_quantised_sampling_stays_near(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll, quantised: dict[str, str]
) -> None:
    if "fp8" in quantised.values() and torch.cuda.get_device_capability(0) < (8, 9):
        pytest.skip("this GPU has no 8-bit floats")
    backend = make_backend(devices="gpu:0", inference=quantised)
    report = backend.train(roll(backend, requests))
    assert 0 < report.gap_mean < 0.2


def drawn(backend: LocalBackend, requests: Sequence[SampleRequest]) -> list[Sample]:
    return [sample for group in backend.sample(requests, PARAMS) for sample in group]


def test_recorded_steps_draw_what_plain_steps_draw(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    recorded, plain = make_backend(devices="gpu:0"), make_backend(devices="gpu:0")
    engine_of(plain)._graphs._records = False
    for step in range(2):
        ours, theirs = drawn(recorded, requests), drawn(plain, requests)
        for one, other in zip(ours, theirs, strict=True):
            assert one.tokens_T.tolist() == other.tokens_T.tolist()
            np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=2e-2)
            assert one.entropies_T is not None
            assert other.entropies_T is not None
            np.testing.assert_allclose(one.entropies_T, other.entropies_T, atol=2e-2)
        batch = roll(plain, requests, step=step)
        for backend in (recorded, plain):
            backend.train(batch)
            backend.publish()
    assert len(engine_of(recorded)._graphs) > 0
    assert len(engine_of(plain)._graphs) == 0


def test_recordings_follow_published_weights(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], roll: Roll
) -> None:
    backend = make_backend(devices="gpu:0", lr=0.1)
    before = drawn(backend, requests)
    graphs = len(engine_of(backend)._graphs)
    backend.train(roll(backend, requests))
    backend.publish()
    after = drawn(backend, requests)
    assert any(one.tokens_T.tolist() != other.tokens_T.tolist() for one, other in zip(before, after, strict=True))
    assert graphs > 0


def test_room_made_for_training_changes_nothing(make_backend: MakeBackend, requests: Sequence[SampleRequest]) -> None:
    backend = make_backend(devices="gpu:0")
    before = drawn(backend, requests)
    held = torch.cuda.memory_reserved()
    engine_of(backend).free_cache()
    assert torch.cuda.memory_reserved() < held
    for one, other in zip(drawn(backend, requests), before, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        assert one.logprobs_T.tolist() == other.logprobs_T.tolist()


def test_decoding_waits_for_the_gpu_once_per_segment(
    make_backend: MakeBackend, requests: Sequence[SampleRequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make_backend(devices="gpu:0")
    drawn(backend, requests)  # recordings are made
    run = engine_of(backend)._graphs.run

    def watched(*given: Any) -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run(*given)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(engine_of(backend)._graphs, "run", watched)
    drawn(backend, requests)


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
