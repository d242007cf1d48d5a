"""Decoding as it is done on a GPU, on a CPU: the adapter below its matrix, and kernels by their definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import ConfigError, Sample, SamplingParams
from retrain_local.factory import create_backend
from retrain_local.memory import sizes
from retrain_local.model import load as dtypes
from retrain_local.model import operations
from retrain_local.model.fused import PLAIN, decode_faults
from retrain_local.model.pair import Pair, Placement
from retrain_local.model.projection import SampledStacked
from tests.kit.local_backend import Local
from tests.kit.local_engines import make_engine, paged
from tests.kit.local_pairs import shake
from tests.kit.shared import first_or_long

CPU = torch.device("cpu")
MakePair = Callable[[bool], Pair]


@pytest.fixture
def low_rank_pair(local: Local, monkeypatch: pytest.MonkeyPatch) -> MakePair:
    """A pair with a trained adapter, added at each product; stacked or as on a CPU."""

    def make(stacked: bool) -> Pair:
        monkeypatch.setattr(sizes, "MERGE_LIMIT", 0)
        monkeypatch.setattr(Placement, "is_stacked", property(lambda _: stacked))
        pair = local.pair(seed=1)
        shake(pair, 0.1)
        pair.publish()
        return pair

    return make


def sampled(pair: Pair, local: Local, **options: Any) -> list[Sample]:
    engine = make_engine(pair.sampler, kernels=paged(), **options)
    params = SamplingParams(max_tokens=16, temperature=0.8, entropy=True)
    return [sample for group in engine.sample(local.requests, params) for sample in group]


@pytest.mark.parametrize(
    ("cache_dtype", "atol"), first_or_long([("auto", 1e-4), ("int8", 2e-3)])
)  # where rounding moves a cell
def test_stacked_completions_are_the_same(low_rank_pair: MakePair, local: Local, cache_dtype: str, atol: float) -> None:
    wanted = sampled(low_rank_pair(False), local, cache_dtype=cache_dtype)
    pair = low_rank_pair(True)
    sampler: Any = pair.sampler
    assert isinstance(sampler._layers[0]._down, SampledStacked)
    qkv, trained = sampler._layers[0].qkv, pair.trained._layers[0].qkv  # type: ignore[attr-defined]
    weight = trained._adapter.linear.weight
    assert qkv._stacked.data_ptr() == weight.data_ptr(), "one copy of the frozen matrix, and A below it"
    assert len(qkv._stacked) % 16 == 0
    below = qkv._stacked[len(weight) :]
    assert torch.equal(below[: len(qkv._a)], trained._adapter.a)
    assert not below[len(qkv._a) :].any()
    calls: list[str] = []
    plain = PLAIN
    sampler._decode = replace(plain, swiglu=lambda product: calls.append("gate") or plain.swiglu(product))
    for one, other in zip(sampled(pair, local, cache_dtype=cache_dtype), wanted, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=atol)
    assert len(calls) >= len(sampler._layers) * 8, "decoding went through these kernels"


def test_a_wrong_kernel_is_found(low_rank_pair: MakePair) -> None:
    shape, plain = low_rank_pair(False).sampler.shape, PLAIN
    assert list(decode_faults(plain, CPU, torch.float32, shape, 4)) == []
    wrong: dict[str, Any] = {
        "add_norm": lambda x, added, weight, eps: plain.add_norm(x, None, weight, eps),
        "heads": lambda product, turn, target: plain.heads(product, replace(turn, sin_N1P=-turn.sin_N1P), target),
        "swiglu": lambda product: operations.swiglu(product.y_NO),
    }
    for kernel, function in wrong.items():
        faults = list(decode_faults(replace(plain, **{kernel: function}), CPU, torch.float32, shape, 4))
        assert faults, kernel
        assert all(fault.startswith("decoding's") for fault in faults)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_auto_is_fp32_on_a_cpu_and_bf16_on_a_gpu(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda device: (8, 0))
    auto, fp32, bf16 = (local.context(dtype=name).config for name in ("auto", "fp32", "bf16"))
    assert dtypes.trained_dtype(auto, CPU) == torch.float32
    assert dtypes.trained_dtype(auto, GPU) == torch.bfloat16
    assert dtypes.trained_dtype(fp32, GPU) == torch.float32
    assert dtypes.trained_dtype(bf16, GPU) == torch.bfloat16
    assert all(0 < dtypes.product_s(dtype) < 10 for dtype in dtypes.DTYPES.values())


def test_bf16_that_a_cpu_emulates_is_refused(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
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
