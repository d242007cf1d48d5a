"""Decoding as it is done on a GPU, on a CPU: the adapter below its matrix, and kernels by their definitions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from retrain.api import Sample, SamplingParams
from retrain_local.decoder import PagedAttend, Scores, Target
from retrain_local.memory import sizes
from retrain_local.model import operations
from retrain_local.model.fused import PLAIN, decode_faults
from retrain_local.model.pair import Pair, Placement
from retrain_local.model.projection import SampledStacked
from tests.kit.local_backend import Local
from tests.kit.local_engines import make_engine, paged
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
        numbers = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for name, p in pair.parameters.items():
                if "lora_B" in name:
                    p.copy_(torch.randn(p.shape, generator=numbers) * 0.1)
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
def test_completions_are_those_of_separate_operations(
    low_rank_pair: MakePair, local: Local, cache_dtype: str, atol: float
) -> None:
    wanted = sampled(low_rank_pair(False), local, cache_dtype=cache_dtype)
    pair = low_rank_pair(True)
    sampler: Any = pair.sampler
    assert isinstance(sampler._layers[0]._down, SampledStacked)
    qkv, trained = sampler._layers[0].qkv, pair.trained._layers[0].qkv  # type: ignore[attr-defined]
    weight = trained._adapter.linear.weight
    assert qkv._stacked.data_ptr() == weight.data_ptr(), "one copy of the frozen matrix, and A below it"
    assert len(qkv._stacked) % 8 == 0
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


class Launches(TorchDispatchMode):  # type: ignore[misc]
    """Counts what would be launched on a GPU: operations that are no views and allocate more than memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._inside = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if not (self._inside or function.is_view or "empty" in name or name in ("_unsafe_view", "detach")):
            self.names.append(name)
        return function(*args, **(kwargs or {}))

    def kernel(self, name: str, function: Any, times: int = 1) -> Any:
        """The function as a kernel, or several, of its own."""

        def launch(*given: Any, **named: Any) -> Any:
            self.names += [name] * times
            self._inside = True
            try:
                return function(*given, **named)
            finally:
                self._inside = False

        return launch


class Pages:
    """Attention of the paged kernels: `read` is two launches where keys are cut into stretches."""

    def __init__(self, launches: Launches, of: Any, rows: int) -> None:
        cells = torch.zeros(rows, of.kv_heads, of.head_size)
        self._target = Target(keys_SKD=cells, values_SKD=cells.clone(), slots_B=torch.arange(rows))
        self._read = launches.kernel("attend, join", lambda q: q.clone(), times=2)
        self._write = launches.kernel("write", lambda: None)

    def target(self, layer: int) -> Target | None:
        return self._target

    def read(self, layer: int, queries_NHD: Tensor, scores: Scores) -> Tensor:
        found: Tensor = self._read(queries_NHD)
        return found

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        self._write()
        return self.read(layer, q, scores)


def test_a_layer_takes_at_most_twelve_launches_per_token(low_rank_pair: MakePair) -> None:
    """Stretches of keys included; 21 with separate operations."""
    rows, angles, launches = 4, torch.zeros(4, 1, 8), Launches()
    decoder: Any = low_rank_pair(True).sampler
    pages = Pages(launches, decoder.shape, rows)
    assert isinstance(pages, PagedAttend)
    kernels = {name: launches.kernel(name, getattr(PLAIN, name)) for name in ("add_norm", "heads", "swiglu")}
    x_ND, added_ND = torch.randn(2, rows, decoder.shape.hidden)
    with torch.inference_mode(), launches:
        decoder._layers[1].decoded(x_ND, added_ND, angles, angles, pages, replace(PLAIN, **kernels))
    assert 5 < len(launches.names) <= 12, launches.names


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
