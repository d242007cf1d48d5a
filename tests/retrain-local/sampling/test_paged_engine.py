"""The way of a GPU on a CPU: batches of bucketed sizes in tensors that stay, and kernels that read and write pages."""

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
from torch import Tensor

from retrain.api import SamplingParams
from retrain_local.attention.pages import PagedKernels, Pages, Prefixes
from retrain_local.decoder import Scores
from retrain_local.memory.sizes import BLOCK_SIZE
from retrain_local.sampling import decode as graphs
from retrain_local.sampling.decode import Graphs, bucket, decode_step
from tests.kit.dispatched import Dispatched
from tests.kit.local_engines import PARAMS, Engines, all_same, paged


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


class SharingPages(PagedKernels):
    """Checks that rows have in common what they are said to share, and remembers between how many rows."""

    def __init__(self) -> None:
        self.counts: set[int] = set()

    def read(
        self,
        queries_BHD: Tensor,
        pages: Pages,
        tables_BM: Tensor,
        lengths_B: Tensor,
        scores: Scores,
        prefixes: Prefixes | None = None,
    ) -> Tensor:
        for first, rows in enumerate([] if prefixes is None else prefixes.rows_B.tolist()):
            assert prefixes is not None
            self.counts.add(rows)
            for row in range(first, first + rows):
                tokens = int(prefixes.tokens_B[first])
                assert tokens == prefixes.tokens_B[row]
                assert 0 < tokens < lengths_B[row]
                assert torch.equal(*(tables_BM[at, : tokens // BLOCK_SIZE] for at in (first, row)))
        return super().read(queries_BHD, pages, tables_BM, lengths_B, scores)


def test_rows_of_a_group_share_their_prompt(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels = SharingPages()
    wanted = engines.make(kernels=paged(kernels)).sample(engines.requests, PARAMS)
    assert not kernels.counts, "prompts this short are not worth a launch"
    monkeypatch.setattr(graphs, "SAVED_READS", 1)
    all_same(engines.make(kernels=paged(kernels)).sample(engines.requests, PARAMS), wanted, atol=0.0)
    assert max(kernels.counts) > 1
    kernels.counts.clear()
    engines.make(kernels=paged(kernels), prefix_caching=False).sample(engines.requests, PARAMS)
    assert not kernels.counts, "without prefix caching every row has its own blocks"


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
        batch.given.column_1.zero_()
        decode_step(
            engine._decoder, lambda layer, q, *_: q, batch, entropy=True
        )  # kernels that wait for nothing either
    assert {"mm", "addmm", "linear"} & set(seen.names)
    assert not {"_local_scalar_dense", "nonzero", "is_nonzero", "item", "unique_dim", "masked_select"} & set(seen.names)


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

    def set_stream(self, stream: Any) -> None: ...

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


def test_where_recording_fails_steps_run_after_one_warning(cuda: Cuda, caplog: pytest.LogCaptureFixture) -> None:
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
