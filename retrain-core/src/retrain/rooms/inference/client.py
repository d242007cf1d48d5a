"""Sends requests to the servers of an engine, many at a time, and tries again what fails for a passing reason.

One event loop in a thread of its own does the talking. The caller's thread waits for it in short naps, so a signal or a
request to stop ends it at once: what is still in flight is cancelled, and the connections are closed, which tells the
servers to give those requests up.
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import httpx

from retrain.kernel.errors import BackendError, Problem
from retrain.rooms.inference.connections import Connections
from retrain.rooms.inference.pool import Pool, Server, jittered
from retrain.rooms.inference.settings import Settings

T = TypeVar("T")
NAP_S = 0.1
ONCE_S = 5.0
JOIN_S = 5.0
FAULTS = 3  # wrong answers to one request before it is an error: a server that always errs is not worth `retry_s`
NOT_FOUND, TOO_MANY, NOT_BUILT = 404, 429, 501  # the last: a server started without what is asked for
PASSING = frozenset({408, 425, TOO_MANY})  # and every 5xx


class BadAnswerError(Exception):
    """An answer that must not be trained on; the request is tried again a few times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request. `read` makes the result of the parsed answer, or raises `BadAnswerError`.

    `server` is the only one to ask, where it is given. `repair(server, status)` is awaited after a refusal (4xx): True
    says that it has mended the cause there, and the request is sent again. `label` names the request in messages.
    `is_done(message)`: whether a refusal says that it was done before, when only the answer was lost.
    `once`: not worth a second try, nor much waiting. Without `is_read` the answer is not looked at, JSON or not.
    `or_path`: a 404 passes too, and the next try goes there; for what a server is to read may still be on its way.
    """

    path: str
    read: Callable[[Any], T]
    body: Mapping[str, Any] | None = None  # None = GET
    server: Server | None = None
    repair: Callable[[Server, int], Awaitable[bool]] | None = None
    label: str = ""
    is_done: Callable[[str], bool] | None = None
    once: bool = False
    is_read: bool = True
    or_path: str = ""


class RefusedError(BackendError):
    """A server answered 4xx: the request is wrong and trying again would not help. `status` is its code."""

    def __init__(self, problem: Problem, status: int) -> None:
        super().__init__(problem)
        self.status = status


class Client:
    """The connections to the servers of one engine. BackendError from every method when retrying did not help."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._loop = asyncio.new_event_loop()
        self.pool = Pool(settings.urls, max_concurrent=settings.max_concurrent)
        self._connections = Connections(settings.urls, settings.headers)
        self.retries = 0
        self._thread = threading.Thread(target=self._run_loop, name="inference", daemon=True)
        self._thread.start()

    def run(
        self, calls: Sequence[Call[T]], check_stop: Callable[[], None] | None = None
    ) -> Iterator[list[tuple[int, T]]]:
        """Send all calls; yields (number, result) of those that have finished meanwhile, until all have.

        The first that fails ends all others. `check_stop` is called between naps.
        """
        done: queue.SimpleQueue[tuple[int, T | BaseException]] = queue.SimpleQueue()
        under_way = self._in_loop(self._begun(calls, done))
        left = len(calls)
        try:
            while left:
                batch = _drain(done)
                if check_stop is not None:
                    check_stop()
                for _, result in batch:
                    if isinstance(result, BaseException):
                        raise result
                if batch:
                    left -= len(batch)
                    yield batch  # type: ignore[misc]
        finally:
            self._in_loop(_ended(under_way))

    def results(self, calls: Sequence[Call[T]]) -> list[T]:
        """All results, in order."""
        found = dict(pair for batch in self.run(calls) for pair in batch)
        return [found[number] for number in range(len(calls))]

    def close(self) -> None:
        """Close the connections and end the thread; safe to call twice."""
        if not self._thread.is_alive():
            return
        with suppress(Exception):  # a connection that cannot even be closed is nobody's loss
            asyncio.run_coroutine_threadsafe(self._connections.close(), self._loop).result(JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def send(self, call: Call[T]) -> T:
        """One call, tried again for as long as the settings allow; for coroutines of this client's own loop."""
        loop, retry_s = asyncio.get_running_loop(), 0.0 if call.once else self._settings.retry_s
        timeout_s = ONCE_S if call.once else self._settings.timeout_s
        deadline, tries, faults = math.inf, 0, 0
        failure: _PassingError | None = None
        while True:
            refused = None
            async with self.pool.turn(call.server) as server:
                if failure is not None and loop.time() >= deadline:
                    raise self._given_up(call, server, failure, tries, is_late=True)
                tries += 1
                try:
                    return await self._attempt(call, server, min(timeout_s, deadline - loop.time()))
                except _PassingError as error:
                    failure = error
                except RefusedError as error:
                    refused, failure = error, _PassingError(error.problems[0].what, is_fault=True)
            if refused is not None and refused.status == NOT_FOUND and call.or_path:
                call = replace(call, path=call.or_path, or_path=call.path)
                self.pool.put_aside(server)
                failure = _PassingError(refused.problems[0].what)
            elif refused is not None and (call.repair is None or not await call.repair(server, refused.status)):
                raise refused
            self.retries += 1
            faults += failure.is_fault
            deadline = min(deadline, loop.time() + retry_s)
            pause_s = jittered(max(0.0, server.aside_until - loop.time())) if call.server else 0.0
            is_late = loop.time() + pause_s >= deadline
            if is_late or faults >= FAULTS:
                raise refused or self._given_up(call, server, failure, tries, is_late=is_late)
            await asyncio.sleep(pause_s)

    def _given_up(
        self, call: Call[Any], server: Server, failure: _PassingError, tries: int, *, is_late: bool
    ) -> BackendError:
        what = f"{call.label or call.path} failed: {failure}"
        why = f"tried {tries} times; [inference] retry_s = {self._settings.retry_s:g} ended it" if is_late else ""
        if failure.is_fault:
            why = f"{tries} answers were unusable; nothing of them was trained on"
        fix = "look at the server's log" if failure.was_reached else "start the server, or correct [inference] url"
        return BackendError(Problem(where=server.name, what=what, why=why, fix=fix))

    async def _attempt(self, call: Call[T], server: Server, timeout_s: float) -> T:
        try:
            async with asyncio.timeout(max(0.0, timeout_s)):
                response = await self._connections.exchange(server.url, call.path, call.body)
        except TimeoutError:
            self.pool.put_aside(server)
            raise _PassingError(f"no answer within {timeout_s:g} s") from None
        except httpx.HTTPError as error:
            self.pool.put_aside(server)
            was_reached = not isinstance(error, httpx.ConnectError)
            raise _PassingError(_told(error), was_reached=was_reached) from None
        if response.status_code == TOO_MANY:
            self.pool.too_many(server)
        if response.status_code in PASSING or (response.status_code >= 500 and response.status_code != NOT_BUILT):
            self.pool.put_aside(server, at_least_s=_retry_after_s(response))
            raise _PassingError(f"HTTP {response.status_code}: {_message(response)}")
        self.pool.answered(server)
        if response.status_code >= 300:
            if call.is_done is not None and call.is_done(_message(response)):
                return call.read(None)
            raise self._refused(call, server, response)
        try:
            return call.read(_parsed(response) if call.is_read else None)
        except BadAnswerError as error:
            raise _PassingError(str(error), is_fault=True) from None

    def _refused(self, call: Call[Any], server: Server, response: httpx.Response) -> RefusedError:
        what = f"{call.label or call.path} was refused with HTTP {response.status_code}: {_message(response)}"
        fix = "look at the server's log and its options"
        if response.status_code in (401, 403):
            fix = "set [inference] api_key_env to the environment variable that holds the server's key"
        return RefusedError(Problem(where=server.name, what=what, fix=fix), response.status_code)

    def _in_loop(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _begun(
        self, calls: Sequence[Call[T]], done: queue.SimpleQueue[tuple[int, T | BaseException]]
    ) -> asyncio.Task[None]:
        return asyncio.create_task(self._send_all(calls, done))

    async def _send_all(self, calls: Sequence[Call[T]], done: queue.SimpleQueue[tuple[int, T | BaseException]]) -> None:
        async def one(number: int, call: Call[T]) -> None:
            try:
                result = await self.send(call)
            except Exception as error:  # whatever it is, it belongs to the caller's thread
                done.put((number, error))
            else:
                done.put((number, result))

        async with asyncio.TaskGroup() as group:
            for number, call in enumerate(calls):
                group.create_task(one(number, call))

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


class _PassingError(Exception):
    def __init__(self, text: str, *, is_fault: bool = False, was_reached: bool = True) -> None:
        super().__init__(text)
        self.is_fault = is_fault
        self.was_reached = was_reached


def _drain(done: queue.SimpleQueue[tuple[int, T | BaseException]]) -> list[tuple[int, T | BaseException]]:
    """All that has finished; waits a nap for the first."""
    batch = []
    with suppress(queue.Empty):
        batch.append(done.get(timeout=NAP_S))
        while True:
            batch.append(done.get_nowait())
    return batch


async def _ended(under_way: asyncio.Task[None]) -> None:
    """Until nothing of it is in flight any more, so that the servers may be told to change."""
    under_way.cancel()
    await asyncio.wait({under_way}, timeout=JOIN_S)


def _parsed(response: httpx.Response) -> Any:
    if not response.content:
        return {}
    try:
        return json.loads(response.content)
    except (ValueError, RecursionError) as error:
        raise BadAnswerError(f"the answer is not JSON: {error}") from None


def _message(response: httpx.Response) -> str:
    """What the server says, in one short line."""
    text = response.text
    with suppress(ValueError, AttributeError, TypeError):
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:300] or "no reason given"


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _retry_after_s(response: httpx.Response) -> float:
    try:
        seconds = float(response.headers.get("retry-after", "0"))
    except ValueError:  # a date: the pool's own pause will do
        return 0.0
    return seconds if 0.0 <= seconds < 3600.0 else 0.0
