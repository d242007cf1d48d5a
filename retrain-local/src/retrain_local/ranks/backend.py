"""Backend `local` on several devices that all sample and train: rank 0, the backend of the run, and its workers."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from retrain.api import (
    ActionRow,
    BackendError,
    Deliver,
    Determinism,
    Engine,
    Feed,
    Floats,
    PluginContext,
    Problem,
    RetrainError,
    Sample,
    SampleRequest,
    SamplingParams,
    TopLogprobs,
    TrainBatch,
    TrainReport,
    stream_from,
)
from retrain_local.backend import LocalBackend, closed, create_local
from retrain_local.devices.group import PeerFailedError, ProcessGroup, join, open_store
from retrain_local.devices.torch_devices import Devices
from retrain_local.ranks.workers import POLL_S, Delivered, LostRankError, Start, Stop, Worker, Workers
from retrain_local.sampling.split import Cancellation, DeviceEngine, ParallelEngine, SamplingCancelledError

log = logging.getLogger("retrain")
LEAVE_S = 10.0  # for rank 0 to leave a computation with a rank that is gone


def create_ranked(context: PluginContext, devices: Devices) -> RankedBackend:
    """Start the other ranks, and load the model on all of them at the same time."""
    size, before = len(devices.ranks), torch.get_num_threads()
    threads = max(1, before // size) if devices.trainer.type == "cpu" else before
    store = open_store(0, is_master=True)
    stop_id = getattr(context.tokenizer, "eos_token_id", None)

    def start(rank: int) -> Start:
        return Start(
            rank=rank,
            port=store.port,
            threads=threads,
            config=context.config,
            seeds=context.seeds,
            params=context.params,
            stop_id=None if stop_id is None else int(stop_id),
        )

    workers, cancellation, group = Workers(), Cancellation(), None
    try:
        workers.start(start, size)
        torch.set_num_threads(threads)
        group = join(store, 0, devices, context.config)
        local = create_local(replace(context, check_stop=cancellation.check), devices.of_rank(0), group)
        workers.answers()
        backend = RankedBackend(local, workers, group, cancellation, check_stop=context.check_stop, threads=before)
        backend.settle_sizes()
    except BaseException as error:
        cause = workers.fault() if not isinstance(error, RetrainError) else None
        workers.kill()
        if group is not None:
            group.leave()
        torch.set_num_threads(before)
        if cause is not None:
            raise cause from None
        raise
    return backend


class RemoteEngine:
    """The engine of another rank; LostRankError when that rank is gone."""

    delivers_early = True

    def __init__(self, worker: Worker, cancellation: Cancellation) -> None:
        self._worker, self._cancellation = worker, cancellation

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        if not requests:
            return []
        worker, check = self._worker, self._cancellation.check
        try:
            worker.call("sample", list(requests), params)
            while isinstance(message := worker.next(check), Delivered):
                if deliver is not None:
                    deliver(message.request, message.place, message.sample)
        except SamplingCancelledError:
            worker.send(Stop())
            raise
        except LostRankError:
            self._cancellation.set()
            raise
        if message.error is not None:
            raise message.error
        return list(message.value)

    def metrics(self) -> Mapping[str, float]:
        self._worker.call("metrics")
        return dict(self._worker.answer())

    def close(self) -> None:
        """Do nothing: its process ends with the backend."""


class RankedBackend:
    """`LocalBackend` on every rank: request i goes to rank i mod n, rows are shared by their tokens, gradients summed.

    Every rank makes the same update, so that all hold the same weights. With FSDP each holds a part of the trained
    weights and of the optimizer's moments. Only rank 0 writes, the same files as one process.
    """

    delivers_early = True

    def __init__(
        self,
        local: LocalBackend,
        workers: Workers,
        group: ProcessGroup,
        cancellation: Cancellation,
        *,
        check_stop: Callable[[], None],
        threads: int,
    ) -> None:
        self.capabilities = local.capabilities
        if group.uses_gpus:  # NCCL chooses the order of its sums
            self.capabilities = replace(local.capabilities, determinism=Determinism.NONE)
        self._local, self._workers, self._group, self._cancellation = local, workers, group, cancellation
        self._check_stop, self._threads, self._thread = check_stop, threads, OwnThread()
        self._lost: RetrainError | None = None
        engines: list[Engine] = [local, *(RemoteEngine(worker, cancellation) for worker in workers)]
        self._engine = ParallelEngine([DeviceEngine(engine=e, on_device=nullcontext) for e in engines], cancellation)
        self._is_closed = False

    def sample(
        self, requests: Sequence[SampleRequest], params: SamplingParams, deliver: Deliver | None = None
    ) -> list[list[Sample]]:
        self._open()
        try:
            return self._engine.sample(requests, params, deliver)
        except LostRankError as error:
            raise self._given_up(error) from None

    def stream(self, requests: Sequence[SampleRequest], params: SamplingParams, feed: Feed) -> None:
        # On rank 0 only: one more completion on another rank would make all others wait.
        self._open()
        stream_from(self._local, requests, params, feed)

    def train(self, batch: TrainBatch) -> TrainReport:
        """Update every rank by the rows of all; BackendError when their weights differ."""
        reports: list[TrainReport] = self._together("train", batch)
        for rank, report in enumerate(reports):
            if report.grad_norm != reports[0].grad_norm:
                norms = f"{report.grad_norm!r}, rank 0 one of {reports[0].grad_norm!r}"
                what = f"rank {rank} has a gradient of norm {norms}"
                given = {"where": "training", "why": "ranks that differ train different models"}
                fix = "continue with --resume; report it if it comes back"
                raise self._given_up(BackendError(Problem(code="backend.ranks-differ", what=what, fix=fix, **given)))
        return reports[0]

    def logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        return list(self._together("logprobs", rows, temperature)[0])

    def top_logprobs(self, rows: Sequence[ActionRow], temperature: float, top: int) -> list[TopLogprobs]:
        return list(self._together("top_logprobs", rows, temperature, top)[0])

    def reference_logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        return list(self._together("reference_logprobs", rows, temperature)[0])

    def squared_probs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        return list(self._together("squared_probs", rows, temperature)[0])

    def teacher_logprobs(self, rows: Sequence[ActionRow], temperature: float) -> list[Floats]:
        return list(self._together("teacher_logprobs", rows, temperature)[0])

    def publish(self) -> int:
        return int(self._together("publish")[0])

    def settle_sizes(self) -> None:
        self._together("settle_sizes")

    def metrics(self) -> Mapping[str, float]:
        return self._engine.metrics()

    def save_adapter(self, folder: Path) -> None:
        self._write("save_adapter", folder)

    def save(self, folder: Path) -> None:
        self._write("save", folder)

    def load(self, folder: Path) -> None:
        self._together("load", folder)

    def sample_from(self, folder: Path | None) -> None:
        self._together("sample_from", folder)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._workers.end()
        self._thread.close()
        self._engine.close()  # closes the local backend, too
        self._group.leave()
        torch.set_num_threads(self._threads)

    def _write(self, name: str, folder: Path) -> None:
        # the other ranks are needed only where they hold parts of the weights
        if self._group.shards:
            self._together(name, folder)
        else:
            getattr(self._local, name)(folder)

    def _together(self, name: str, *args: Any) -> list[Any]:
        """Call this method of the local backend on every rank at once, and return the results.

        A stop ends it on every rank before anything has changed, or comes too late and is left to the caller.
        """
        self._open()
        self._cancellation.clear()
        task, stop = None, None
        try:
            for worker in self._workers:
                worker.call(name, *args)
            task = self._thread.begin(lambda: getattr(self._local, name)(*args))
            while not task.done():
                try:
                    if not wait([task], POLL_S).done and stop is None:
                        self._check_stop()
                        self._workers.check_alive()
                except LostRankError:
                    raise
                except BaseException as error:
                    stop = error
                    self._cancellation.set()
                    self._workers.stop()
            return self._outcome(task, stop)
        except LostRankError as error:
            self._cancellation.set()
            given_up = self._given_up(error)
            wait([task] if task else [], LEAVE_S)
            raise given_up from None

    def _outcome(self, task: Future[Any], stop: BaseException | None) -> list[Any]:
        error = task.exception()
        if error is not None and self._group.is_broken:
            cause = self._workers.fault() if not isinstance(error, RetrainError) else None
            what, fix = f"the ranks lost each other: {error}", "continue with --resume"
            self._given_up(cause or BackendError(Problem(code="backend.ranks-apart", what=what, fix=fix)))
            raise cause or error
        try:
            values = [None if error else task.result(), *self._workers.answers()]
        except LostRankError:
            raise
        except RetrainError as cause:
            if error is None or isinstance(error, PeerFailedError):
                raise cause from None
            values = []
        if stop is not None and error is not None:
            raise stop
        if error is not None:
            raise error
        return values

    def _given_up(self, error: RetrainError) -> RetrainError:
        """End every other rank; only `close` works from now on."""
        self._lost = self._lost or error
        self._workers.kill()
        self._group.abort()
        return error

    def _open(self) -> None:
        if self._lost is not None:
            raise self._lost
        if self._is_closed:
            raise closed()


class OwnThread:
    """One daemon thread for all tasks, since PyTorch keeps a pool of threads for each thread that uses it."""

    def __init__(self) -> None:
        self._tasks: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._serve, name="rank 0", daemon=True).start()

    def begin(self, work: Callable[[], Any]) -> Future[Any]:
        future: Future[Any] = Future()
        self._tasks.put((future, work))
        return future

    def close(self) -> None:
        self._tasks.put(None)

    def _serve(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, work = task
            try:
                future.set_result(work())
            # Handed to the thread that waits, an interrupt included.
            except BaseException as error:
                future.set_exception(error)
            # The result may be as large as the model, and the next task may be hours away.
            del task, future, work
