"""Decoding steps as CUDA graphs: captured once per batch size, then replayed with one launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from retrain_local.memory.limits import is_out_of_memory

log = logging.getLogger("retrain")
SMALL = (1, 2, 4, 8)
MIDDLE, LARGE = 8, 32  # steps between buckets up to 32 rows and above
WARM_UP = 2  # calls before the capture, in which libraries initialise and Triton compiles


def bucket(rows: int) -> int:
    """The padded batch size for `rows` rows: 1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 160 and so on."""
    for size in SMALL:
        if rows <= size:
            return size
    step = MIDDLE if rows <= LARGE else LARGE
    return -(-rows // step) * step


@dataclass(frozen=True, slots=True, eq=False)
class _Recording:
    """A graph and the tensors it updates, which must live as long as the graph."""

    graph: torch.cuda.CUDAGraph
    state: tuple[Tensor, ...]

    def is_of(self, state: Sequence[Tensor]) -> bool:
        """Whether these are the very tensors."""
        return [tensor.data_ptr() for tensor in self.state] == [tensor.data_ptr() for tensor in state]


class Graphs:
    """Captured steps by key. They share one memory pool, since they run one after another and whatever outlives a step
    is in tensors allocated before the capture.

    A step takes no argument and returns nothing; it works on tensors at fixed addresses, never synchronises, and does
    the same for the same key. If a capture fails, steps run without graphs, after one warning.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None
        self._recordings: dict[Hashable, _Recording] = {}
        self._records = device.type == "cuda"

    def __len__(self) -> int:
        return len(self._recordings)

    def run(self, key: Hashable, step: Callable[[], None], state: Sequence[Tensor]) -> None:
        """Run `step` once. `state` lists every tensor that it updates, which the warm-up restores.

        A key whose tensors have moved is captured again.
        """
        if not self._records:
            step()
            return
        with torch.cuda.device(self._device):
            recording = self._recordings.get(key)
            if recording is None or not recording.is_of(state):
                recording = self._recorded(step, state)
                if recording is None:
                    step()
                    return
                self._recordings[key] = recording
            recording.graph.replay()

    def forget(self) -> None:
        """Drop all captures: their tensors are about to be reallocated."""
        self._recordings.clear()
        self._pool = None

    def _recorded(self, step: Callable[[], None], state: Sequence[Tensor]) -> _Recording | None:
        before = [tensor.clone() for tensor in state]
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        try:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    step()
                    _put_back(state, before)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # another thread may be training: its CUDA calls must not invalidate this capture
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            if _ran_out(error):
                raise torch.OutOfMemoryError(str(error)) from error
            log.warning("CUDA graphs are off, decoding step by step: %s", str(error).splitlines()[0])
            self._records = False
            self.forget()
            torch.cuda.synchronize()
            _put_back(state, before)
            return None
        return _Recording(graph, tuple(state))


def _ran_out(error: BaseException | None) -> bool:
    """Whether running out of memory is the root cause: ending a broken capture raises an error of its own."""
    while error is not None:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            return True
        error = error.__context__
    return False


def _put_back(state: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for tensor, old in zip(state, before, strict=True):
        tensor.copy_(old)
