"""A captured CUDA graph: the memory that it reads, its launches, and the check at each replay."""

from __future__ import annotations

import weakref
from collections import Counter
from typing import TYPE_CHECKING, Any

import torch

from tests.kit.fake_gpu.memory import GraphPool
from tests.kit.fake_gpu.record import Place
from tests.kit.fake_gpu.work import Work

if TYPE_CHECKING:
    from tests.kit.fake_gpu.gpu import FakeGpu

REPLAYED = " replayed"  # added to the phase of a graph's work


class FakeGraph:
    """In place of `torch.cuda.CUDAGraph`; the storages from outside that it reads must live at every replay."""

    def __init__(self, gpu: FakeGpu) -> None:
        self.launched: Counter[str] = Counter()
        self.work: dict[tuple[str, str], Work] = {}
        self.pool_handle = GraphPool()
        self.peak = 0
        self.is_broken = False
        self._gpu = gpu
        self._made: set[int] = set()
        self._inputs: dict[int, tuple[weakref.ref[Any], Place]] = {}

    def makes(self, key: int) -> None:
        self._made.add(key)

    def reads(self, tensor: torch.Tensor, place: Place) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._made and storage._cdata not in self._inputs:
            self._inputs[storage._cdata] = weakref.ref(storage), place

    @property
    def num_inputs(self) -> int:
        return len(self._inputs)

    def replay(self) -> None:
        record, phase = self._gpu.record, self._gpu.phase
        record.replays += 1
        for name, count in self.launched.items():
            record.operations[phase, name] += count
        for (name, function), work in self.work.items():
            key = f"{phase}{REPLAYED}", name, function
            record.work[key] = record.work.get(key, Work()) + work
        for reference, place in self._inputs.values():
            if reference() is None:
                self._gpu.fault("graph", "a replay reads memory that was given back", place)

    def pool(self) -> GraphPool:
        return self.pool_handle
