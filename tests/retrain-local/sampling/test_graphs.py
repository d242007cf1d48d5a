"""Recording on CUDA is tested in test_gpu_engine.py; here a stand-in for torch.cuda records what is asked of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain_local.sampling import decode as graphs
from retrain_local.sampling.decode import Graphs, bucket


@given(rows=st.integers(1, 5000))
def test_a_bucket_holds_its_rows_and_wastes_little(rows: int) -> None:
    size = bucket(rows)
    assert bucket(size) == size <= bucket(rows + 1)
    assert 0 <= size - rows < max(8, min(32, rows))
    assert sorted({bucket(each) for each in range(1, 100)}) == [1, 2, 4, 8, 16, 24, 32, 64, 96, 128]


class Cuda:
    """torch.cuda as far as `Graphs` uses it: what is called while a graph records is done at each replay."""

    def __init__(self) -> None:
        self.recording: Any = None
        self.pools: list[Any] = []
        self.error: Exception | None = None
        self.mode = ""
        self.OutOfMemoryError = torch.OutOfMemoryError

    def CUDAGraph(self) -> Any:
        graph = SimpleNamespace(steps=[])
        graph.replay = lambda: [step() for step in graph.steps]
        return graph

    @contextlib.contextmanager
    def graph(self, graph: Any, *, pool: Any, stream: Any, capture_error_mode: str) -> Iterator[None]:
        self.recording, self.mode = graph, capture_error_mode
        self.pools.append(pool)
        try:
            yield
            if self.error is not None:
                raise self.error
        except torch.OutOfMemoryError:
            raise RuntimeError("operation failed due to a previous error during capture") from None
        finally:
            self.recording = None

    @contextlib.contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    stream = device

    def Stream(self, device: Any) -> Any:
        return SimpleNamespace(wait_stream=lambda other: None)

    def current_stream(self) -> Any:
        return self.Stream(None)

    def graph_pool_handle(self) -> object:
        return object()

    def synchronize(self) -> None:
        """Nothing is under way."""


class Counter:
    """A step that counts in a tensor, and knows how often it was really called."""

    def __init__(self, cuda: Cuda) -> None:
        self.count = torch.zeros(1)
        self.calls = 0
        self._cuda = cuda

    def step(self) -> None:
        if self._cuda.recording is not None:
            self._cuda.recording.steps.append(self.advance)
            return
        self.calls += 1
        self.advance()

    def advance(self) -> None:
        self.count += 1


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    stand_in = Cuda()
    monkeypatch.setattr(graphs.torch, "cuda", stand_in)
    return stand_in


def made(cuda: Cuda) -> tuple[Graphs, Counter, Callable[[str], None]]:
    recorded, counter = Graphs(torch.device("cuda", 0)), Counter(cuda)
    return recorded, counter, lambda key: recorded.run(key, counter.step, [counter.count])


def test_the_warm_up_leaves_no_trace_and_every_key_is_recorded_once_in_one_pool(cuda: Cuda) -> None:
    recorded, counter, run = made(cuda)
    for times, key in enumerate("aabab", start=1):
        run(key)
        assert counter.count.item() == times
    assert counter.calls == 2 * graphs.WARM_UP, "later runs are replays"
    assert cuda.mode == "thread_local"
    assert len(recorded) == len(cuda.pools) == 2
    assert cuda.pools[0] is cuda.pools[1]
    on_cpu, calls = Graphs(torch.device("cpu")), list[int]()
    for _ in range(3):
        on_cpu.run("key", lambda: calls.append(1), [])
    assert (len(calls), len(on_cpu)) == (3, 0)


def test_forgotten_steps_and_moved_tensors_are_recorded_again(cuda: Cuda) -> None:
    recorded, counter, run = made(cuda)
    run("a")
    recorded.forget()
    assert len(recorded) == 0
    run("a")
    assert counter.count.item() == 2
    assert cuda.pools[0] is not cuda.pools[1]
    other = Counter(cuda)
    recorded.run("a", other.step, [other.count])
    assert (counter.count.item(), other.count.item(), len(cuda.pools)) == (2, 1, 3)


def test_where_recording_fails_steps_run_as_they_are_after_one_warning(
    cuda: Cuda, caplog: pytest.LogCaptureFixture
) -> None:
    recorded, counter, run = made(cuda)
    cuda.error = RuntimeError("operation not permitted when stream is capturing\nmore")
    with caplog.at_level(logging.WARNING, logger="retrain"):
        for key in "aab":
            run(key)
    assert counter.count.item() == 3
    assert len(recorded) == 0
    assert [record.getMessage() for record in caplog.records] == [
        "CUDA graphs are off, decoding step by step: operation not permitted when stream is capturing"
    ]


def test_running_out_of_memory_is_for_the_engine_to_answer(cuda: Cuda) -> None:
    recorded, _, run = made(cuda)
    cuda.error = torch.OutOfMemoryError("CUDA out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        run("a")
    cuda.error = None
    run("a")
    assert len(recorded) == 1
