"""The fake GPU notices each kind of mistake that it exists for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch

from tests.kit.fake_gpu.card import H100, MIB
from tests.kit.fake_gpu.gpu import FakeGpu

pytestmark = pytest.mark.fake_gpu
CARD = "cuda:0"


@pytest.fixture
def gpu() -> Iterator[FakeGpu]:
    gpu = FakeGpu(replace(H100, total_bytes=H100.context_bytes + 64 * MIB))
    with gpu.in_place():
        yield gpu


def ones(*size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(size, dtype=dtype, device=CARD)


WAITS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda x: float(x.sum()),
    "tolist": lambda x: x.tolist(),
    "copy cuda to cpu": lambda x: x.cpu(),
    "copy cpu to cuda": lambda x: x.copy_(torch.ones(4)),
    "bincount": lambda x: torch.bincount(x.long()),
    "index by a mask": lambda x: x[x > 0],
    "index from the host": lambda x: x[torch.tensor([0, 1])],
    "synchronize": lambda x: torch.cuda.synchronize(),
}


@pytest.mark.parametrize("what", WAITS)
def test_the_host_waits(gpu: FakeGpu, what: str) -> None:
    x = ones(4)
    assert not gpu.record.waits
    WAITS[what](x)
    assert [(wait.what, count) for wait, count in gpu.record.waits.items()] == [(what, 1)]


def test_a_copy_through_pinned_memory_waits_for_nothing(gpu: FakeGpu) -> None:
    x, pinned = ones(4), torch.empty(4, pin_memory=True)
    x.copy_(pinned, non_blocking=True)
    pinned.copy_(x, non_blocking=True)
    x.copy_(torch.ones(4).pin_memory(), non_blocking=True)
    assert not gpu.record.waits
    x.copy_(pinned)
    assert gpu.record.waits.total() == 1


def test_a_product_of_two_dtypes_is_a_fault(gpu: FakeGpu) -> None:
    ones(4, 4, dtype=torch.bfloat16) @ ones(4, 4, dtype=torch.bfloat16)
    assert not gpu.record.faults
    torch.mm(ones(4, 4, dtype=torch.bfloat16), ones(4, 4))
    assert [fault.kind for fault in gpu.record.faults] == ["dtype"]


def test_tensors_of_two_devices_do_not_mix(gpu: FakeGpu) -> None:
    with pytest.raises(RuntimeError, match="device"):
        ones(4) + torch.ones(4)


def test_a_replay_reads_an_input_that_is_gone(gpu: FakeGpu) -> None:
    kept, gone, into = ones(4), ones(4), ones(4)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        into.add_(kept).add_(gone)
    graph.replay()
    assert not gpu.record.faults
    del gone
    graph.replay()
    assert [fault.kind for fault in gpu.record.faults] == ["graph"]
    assert gpu.record.operations_in("start")["add_"] == 4  # of two replays, not of the capture


def test_a_wait_breaks_a_capture_and_leaves_its_stream_current(gpu: FakeGpu) -> None:
    x, before = ones(4), torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="previous error"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        x.sum().item()
    assert [fault.kind for fault in gpu.record.faults] == ["capture"]
    assert torch.cuda.current_stream() is not before


def test_memory_is_counted_until_it_is_gone(gpu: FakeGpu) -> None:
    x = torch.empty(MIB, device=CARD)
    view = x[1:]
    assert gpu.memory.live == 4 * MIB
    del x
    assert gpu.memory.live == 4 * MIB
    del view
    assert gpu.memory.live == 0
    assert gpu.memory.peaks == {"start": 4 * MIB}


def test_a_full_card_is_out_of_memory(gpu: FakeGpu) -> None:
    kept = torch.empty(8 * MIB, device=CARD)
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(9 * MIB, device=CARD)
    del kept
    torch.empty(9 * MIB, device=CARD)


def test_the_memory_of_graphs_is_shared_in_a_pool_and_given_back(gpu: FakeGpu) -> None:
    x, pool, graphs = torch.empty(MIB, device=CARD), torch.cuda.graph_pool_handle(), []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool):
            x.copy_(x * 2 + 1)
    assert gpu.memory.pool_bytes == 8 * MIB  # both intermediate results of one graph
    del pool
    graphs.clear()
    assert gpu.memory.pool_bytes == 0
