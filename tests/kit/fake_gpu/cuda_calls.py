"""`torch.cuda` of a fake GPU: properties, memory, streams, events and the capture of graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.kit.fake_gpu.graph import FakeGraph

if TYPE_CHECKING:
    from tests.kit.fake_gpu.gpu import FakeGpu

CONTEXT_CALLS = ("init_gpu_context", "init_cuda_context")  # of FakeTensorMode, by version


class FakeStream:
    """A stream or an event; `stack` are the streams that are current, the innermost last."""

    cuda_stream = 0

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def synchronize(self) -> None:
        self._gpu.waits("synchronize")

    def wait_stream(self, other: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def record_event(self, event: Any = None) -> Any:
        return event or FakeStream(self._gpu)

    def record(self, stream: Any = None) -> None: ...

    def wait(self, stream: Any = None) -> None: ...

    def query(self) -> bool:
        return True


@contextmanager
def cuda_replaced(gpu: FakeGpu) -> Iterator[None]:
    import torch._subclasses.fake_tensor as fake_tensor

    with ExitStack() as stack:
        for name in CONTEXT_CALLS:
            if hasattr(fake_tensor, name):
                stack.enter_context(mock.patch.object(fake_tensor, name))
        for name, value in (_properties(gpu) | _memory(gpu) | _streams(gpu)).items():
            stack.enter_context(mock.patch.object(torch.cuda, name, value, create=True))
        yield


def _properties(gpu: FakeGpu) -> dict[str, Callable[..., Any]]:
    card = gpu.card
    properties = SimpleNamespace(
        name=card.name,
        total_memory=card.total_bytes,
        multi_processor_count=card.multiprocessors,
        major=card.capability[0],
        minor=card.capability[1],
    )
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: card.count,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: card.capability,
        "get_device_properties": lambda device=None: properties,
        "get_device_name": lambda device=None: card.name,
        "get_rng_state": lambda device=None: None,
        "set_rng_state": lambda state, device=None: None,
        "manual_seed_all": lambda seed: None,
    }


def _memory(gpu: FakeGpu) -> dict[str, Callable[..., Any]]:
    memory = gpu.memory
    return {
        "mem_get_info": lambda device=None: (memory.free, gpu.card.total_bytes),
        "memory_allocated": lambda device=None: memory.live,
        "memory_reserved": lambda device=None: memory.reserved,
        "max_memory_reserved": lambda device=None: memory.most_reserved,
        "max_memory_allocated": lambda device=None: max(memory.peaks.values(), default=0),
        "reset_peak_memory_stats": lambda device=None: None,
        "get_per_process_memory_fraction": lambda device=None: 1.0,
        "set_per_process_memory_fraction": lambda fraction, device=None: None,  # the card stays as large as it is
        "empty_cache": memory.empty_cache,
    }


def _streams(gpu: FakeGpu) -> dict[str, Callable[..., Any]]:
    current = [FakeStream(gpu)]

    @contextmanager
    def stream(chosen: FakeStream | None) -> Iterator[None]:
        current.append(chosen or current[-1])
        try:
            yield
        finally:
            current.pop()

    @contextmanager
    def device(index: Any) -> Iterator[None]:
        yield

    class Capture:
        """`torch.cuda.graph`: as there, a capture that breaks raises at its end, and its stream stays current."""

        def __init__(self, graph: FakeGraph, pool: Any = None, stream: Any = None, **named: Any) -> None:
            graph.pool_handle = pool or gpu.memory.open_pool()
            self._graph, self._stream = graph, stream or FakeStream(gpu)

        def __enter__(self) -> None:
            gpu.memory.empty_cache()
            gpu.memory.in_capture = 0
            current.append(self._stream)
            gpu.capturing = self._graph

        def __exit__(self, *given: object) -> None:
            graph, gpu.capturing = self._graph, None
            if graph.is_broken:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
            current.pop()
            gpu.record.captured.append(graph.launched)
            gpu.memory.grow_pool(graph.pool_handle, graph.peak, gpu.phase)

    return {
        "Stream": lambda *given, **named: FakeStream(gpu),
        "Event": lambda *given, **named: FakeStream(gpu),
        "current_stream": lambda device=None: current[-1],
        "default_stream": lambda device=None: current[0],
        "stream": stream,
        "set_stream": current.append,
        "device": device,
        "synchronize": lambda device=None: gpu.waits("synchronize"),
        "CUDAGraph": lambda *given, **named: FakeGraph(gpu),
        "graph": Capture,
        "graph_pool_handle": gpu.memory.open_pool,
    }
