"""Requests of many clients, gathered into batches for the one thread that owns the policy."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from retrain.kernel.contracts.backend import Backend
from retrain.kernel.errors import RetrainError
from retrain.kernel.types import ActionRow, Sample, SampleRequest, SamplingParams, StopReason
from retrain.run.streaming import RanksTokens, StreamsTokens, TopLogprobs, stream_from
from retrain.tasks.rollout import check_sample

LOG = logging.getLogger("retrain")
POLL_S = 0.2  # between two looks at `is_over`
# Tokens. Every completion ends at its own limit, so the batch needs none.
NO_LIMIT = 2**24
MOST_ROWS = 1024  # completions that are sampled or wait
BY_TOKEN = ("tokens_T", "logprobs_T", "entropies_T", "engine_logprobs_T", "experts_TLK")  # arrays of a sample


class BusyError(Exception):
    """Too many completions are under way."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Piece:
    """New tokens of completion `place`, as a sample; `reason` once it has ended."""

    place: int
    sample: Sample
    reason: StopReason | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    message: str
    is_stopping: bool = False


STOPPING = Failure(message="the server is stopping", is_stopping=True)
Event = Piece | list[TopLogprobs] | Failure


class Inbox:
    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: asyncio.Queue[tuple[Work, Event]] = asyncio.Queue()

    def put(self, work: Work, event: Event) -> None:
        # The loop is closed when the server has stopped, and no client waits any more.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, (work, event))

    async def next(self) -> tuple[Work, Event]:
        return await self._events.get()


@dataclass(slots=True, kw_only=True, eq=False)
class Work:
    """A request for the policy; its events go to the coroutine that answers the client, and may cancel it."""

    model: str
    temperature: float
    events: Inbox
    is_cancelled: bool = False

    @property
    def num_rows(self) -> int:
        return 1


@dataclass(slots=True, kw_only=True, eq=False)
class Generation(Work):
    """The completions of one prompt; those in `ended` need no more tokens."""

    request: SampleRequest
    max_tokens: int
    greedy: bool
    ended: set[int] = field(default_factory=set)
    counts: dict[int, int] = field(default_factory=dict)

    @property
    def num_rows(self) -> int:
        return len(self.request.seeds_G)


@dataclass(slots=True, kw_only=True, eq=False)
class Ranking(Work):
    rows: Sequence[ActionRow]
    top: int


class Batcher:
    """Runs the work of all clients in order of arrival, batched where possible.

    `submit` is for any thread, `run` for the one that owns the policy. All generations that wait for the same model and
    temperature are one batch; others of the kind join while it runs, unless something else waits before them.
    `use(model)` is called before each batch. With `entropy` the policy reports it for every token. `gather_s`: how long
    the first of a batch waits for others, where none can join later. With `is_run` an error of the policy ends `run`.
    """

    def __init__(
        self,
        backend: Backend,
        use: Callable[[str], None] = lambda model: None,
        *,
        entropy: bool = False,
        gather_s: float = 0.0,
        is_run: bool = False,
    ) -> None:
        self._backend, self._use = backend, use
        self._entropy, self._gather_s, self.is_run = entropy, gather_s, is_run
        self._waiting: deque[Work] = deque()
        self._changed = threading.Condition()
        self._rows = 0
        self._is_closed = False
        self.is_over: Callable[[], bool] = lambda: False
        # where completions cannot be ended one by one, only those with the same limit are sampled together
        self._streams = isinstance(backend, StreamsTokens)

    @property
    def can_rank(self) -> bool:
        """True if the backend reports alternatives to the sampled tokens."""
        return isinstance(self._backend, RanksTokens)

    def submit(self, work: Work) -> None:
        with self._changed:
            if self._is_closed:
                work.events.put(work, STOPPING)
                return
            if self._rows + work.num_rows > MOST_ROWS:
                raise BusyError
            self._rows += work.num_rows
            self._waiting.append(work)
            self._changed.notify()

    def run(self, is_over: Callable[[], bool] = lambda: False) -> None:
        """Work until `close` or `is_over`; both also end the completions in progress."""
        self.is_over = is_over
        while not self._is_closed and not is_over():
            with self._changed:
                if not self._waiting:
                    self._changed.wait(POLL_S)
                first = self._waiting.popleft() if self._waiting else None
            if first is not None:
                if self._gather_s and not self._streams:
                    time.sleep(self._gather_s)
                self._run_one(first)

    def wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            for work in self._waiting:
                work.events.put(work, STOPPING)
            self._waiting.clear()
            self._changed.notify_all()

    def _run_one(self, first: Work) -> None:
        batch: list[Work] = [first]
        try:
            self._use(first.model)
            if isinstance(first, Ranking):
                assert isinstance(self._backend, RanksTokens)
                if not first.is_cancelled:
                    tops = self._backend.top_logprobs(first.rows, first.temperature, first.top)
                    first.events.put(first, tops)
            elif isinstance(first, Generation):
                works = [first, *self.waiting_like(first, in_front=False)]
                batch[:] = works
                params = SamplingParams(
                    max_tokens=NO_LIMIT if self._streams else first.max_tokens,
                    temperature=first.temperature,
                    entropy=self._entropy,
                    greedy=first.greedy,
                )
                # `batch` grows by similar works that arrive meanwhile
                stream_from(self._backend, [work.request for work in works], params, _Feed(self, works, batch))
        except BaseException as error:
            if self.is_run or not isinstance(error, Exception):
                _fail(batch, STOPPING)
                raise
            # one request that breaks something must not end the server
            if isinstance(error, RetrainError):
                LOG.error("%s", error)
                message = error.problems[0].head if error.problems else str(error)
            else:
                LOG.exception("a request failed")
                message = f"internal error: {type(error).__name__}"
            _fail(batch, Failure(message=message))
        else:
            if self.is_over():
                _fail(batch, STOPPING)
        finally:
            with self._changed:
                self._rows -= sum(work.num_rows for work in batch)

    def waiting_like(self, first: Generation, *, in_front: bool) -> list[Generation]:
        """Dequeue the works that may be sampled together with `first`; `in_front`: only from the front of the queue."""
        with self._changed:
            key, others = self._key(first), deque[Work]()
            found: list[Generation] = []
            for work in self._waiting:
                # From the front only, or a steady stream of equal requests would starve all others.
                is_like = isinstance(work, Generation) and self._key(work) == key and not (in_front and others)
                (found if is_like else others).append(work)  # type: ignore[arg-type]
            self._waiting = others
        return found

    def _key(self, work: Work) -> Hashable:
        if not isinstance(work, Generation):
            return None
        return work.model, work.temperature, work.greedy, 0 if self._streams else work.max_tokens


class _Feed:
    def __init__(self, batcher: Batcher, works: list[Generation], batch: list[Work]) -> None:
        self._batcher, self._works, self._batch = batcher, works, batch

    def take(self, request: int, place: int, piece: Sample, *, is_done: bool) -> bool:
        work = self._works[request]
        # A run must train on finite numbers; a server may send any.
        if self._batcher.is_run:
            check_sample(piece, "a call")
        if work.is_cancelled or place in work.ended or self._batcher.is_over():
            return False
        before = work.counts.get(place, 0)
        room = work.max_tokens - before
        cut = len(piece.tokens_T) > room
        work.counts[place] = before + min(room, len(piece.tokens_T))
        is_full = work.counts[place] >= work.max_tokens
        reason = piece.stop_reason if is_done and not cut else StopReason.LENGTH if is_full else None
        work.events.put(work, Piece(place=place, sample=first_tokens(piece, room), reason=reason))
        if reason is not None:
            work.ended.add(place)
        return reason is None

    def more(self) -> Sequence[SampleRequest]:
        arrived = [] if self._batcher.is_over() else self._batcher.waiting_like(self._works[0], in_front=True)
        self._works.extend(arrived)
        self._batch.extend(arrived)
        return [work.request for work in arrived]


def first_tokens(sample: Sample, count: int) -> Sample:
    if len(sample.tokens_T) <= count:
        return sample
    arrays = {name: array[:count] for name in BY_TOKEN if (array := getattr(sample, name)) is not None}
    return replace(sample, **arrays)


def _fail(batch: Sequence[Work], failure: Failure) -> None:
    for work in batch:
        work.events.put(work, failure)
