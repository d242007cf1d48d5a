"""The way of a GPU on a CPU: batches of bucketed sizes in tensors that stay, and kernels that read and write pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from retrain.api import SamplingParams
from retrain_local.attention.pages import PagedKernels, Pages
from retrain_local.sampling.decode import bucket, decode_step
from tests.kit.dispatched import Dispatched
from tests.kit.local_engines import PARAMS, Engines, all_same, paged

pytestmark = pytest.mark.slow


class NotingPages(PagedKernels):
    """Remembers with which batch sizes and addresses it was used."""

    def __init__(self) -> None:
        self.addresses: dict[tuple[int, ...], set[int]] = {}

    def read(self, queries_BHD: Tensor, pages: Pages, tables_BM: Tensor, *rest: Any) -> Tensor:
        self.addresses.setdefault(tuple(tables_BM.shape), set()).add(tables_BM.data_ptr())
        return super().read(queries_BHD, pages, tables_BM, *rest)


@pytest.mark.long
@pytest.mark.parametrize(("pool", "gap"), [("bf16", 0.05), ("int8", 0.05), ("fp8", 0.3)])
def test_kernels_that_quantise_agree_with_the_pool_that_does(engines: Engines, pool: str, gap: float) -> None:
    params = SamplingParams(max_tokens=1 + 6, temperature=0.8)
    ours, theirs = (
        engines.make(kernels=kernels, cache_dtype=pool).sample(engines.requests, params)
        for kernels in (paged(NotingPages()), None)
    )
    gaps = []
    for group, others in zip(ours, theirs, strict=True):
        for one, other in zip(group, others, strict=True):
            same = 0
            while same < min(len(one.tokens_T), len(other.tokens_T)) and one.tokens_T[same] == other.tokens_T[same]:
                same += 1
            gaps.append(abs(one.logprobs_T[:same] - other.logprobs_T[:same]).max(initial=0.0))
    assert max(gaps) < gap


def test_every_size_of_batch_has_one_place_in_memory_for_good(engines: Engines) -> None:
    kernels = paged(NotingPages())
    engine = engines.make(kernels=kernels)
    for _ in range(3):
        engine.sample(engines.requests, PARAMS)
        engine.publish()
    for (rows, width), addresses in kernels.paged.addresses.items():
        assert rows == bucket(rows)
        assert width & (width - 1) == 0
        assert len(addresses) == 1


def test_what_a_step_advances_is_put_back_by_a_warm_up(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording is preceded by calls that must leave no trace: here every step is warmed up."""
    engine, other = engines.make(kernels=paged(NotingPages())), engines.make(kernels=paged(NotingPages()))

    def run(key: Any, step: Callable[[], None], state: tuple[Tensor, ...]) -> None:
        before = [tensor.clone() for tensor in state]
        step()
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        step()

    monkeypatch.setattr(engine._graphs, "run", run)
    ours, theirs = engine.sample(engines.requests, PARAMS), other.sample(engines.requests, PARAMS)
    all_same(ours, theirs, atol=0.0)


def test_a_step_waits_for_nothing(engines: Engines) -> None:
    """What CUDA forbids while it records: numbers that come to the host."""
    kernels = paged(NotingPages())
    engine = engines.make(kernels=kernels)
    engine.sample(engines.requests, PARAMS)
    (batch, _), *_ = engine._batches.values()

    with torch.inference_mode(), Dispatched() as seen:
        batch.column_1.zero_()
        decode_step(
            engine._decoder, lambda layer, q, *_: q, batch, entropy=True
        )  # kernels that wait for nothing either
    assert {"mm", "addmm", "linear"} & set(seen.names)
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "unique_dim", "masked_select"} & set(seen.names)
