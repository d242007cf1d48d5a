"""Sends requests to the servers of an engine, many at a time, and retries transient failures.

An event loop in its own thread does the I/O. The caller's thread polls it, so a signal or a request to stop takes
effect at once: requests in flight are cancelled and their connections closed, and the servers drop them.
"""

from __future__ import annotations

import asyncio
import json
import math
import queue
import ssl
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import httpx

from retrain.engines.pool import NoServerError, Pool, Server, jittered
from retrain.engines.table import Settings
from retrain.kernel.errors import BackendError, Problem

T = TypeVar("T")
POLL_S = 0.1
ONCE_S = 5.0  # for all of a request that is not retried
JOIN_S = 5.0  # closing must not hang on a dead connection
# To one request, per server. One that always answers wrongly is not worth all of `retry_s`.
MAX_BAD_ANSWERS = 3
# 501 is not transient: the server was started without the feature.
NOT_FOUND, TOO_MANY, NOT_IMPLEMENTED = 404, 429, 501
TRANSIENT = frozenset({408, 425, TOO_MANY})  # and every other 5xx


class BadAnswerError(Exception):
    """An answer that must not be trained on; the request is retried a few times."""


class OtherModelError(BadAnswerError):
    """Another model or adapter answered than the requested one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[T]):
    """One request. `read` turns the parsed answer into the result, or raises `BadAnswerError`.

    `server` pins it to one server. `key` is the policy version that it needs: it goes only to servers that hold it, and
    `addressed` makes the request for one of them, under that server's name for the version. `label` names the request
    in messages. `is_done(message)` is True if a refusal means that the work is done already, its answer having been
    lost. `once`: no retry, and `timeout_s` in all. `ignores_answer`: the body need not be JSON. `fallback_path`: a 404
    is transient and the next attempt goes there, since files for the server may arrive late. `urls`: the servers behind
    a router, all of which must accept it.
    """

    path: str
    read: Callable[[Any], T] = lambda answer: answer
    body: Mapping[str, Any] | None = None  # None = GET
    server: Server | None = None
    key: str = ""
    addressed: Callable[[Server], Call[T]] | None = None
    label: str = ""
    is_done: Callable[[str], bool] | None = None
    once: bool = False
    timeout_s: float = ONCE_S
    ignores_answer: bool = False
    fallback_path: str = ""
    urls: tuple[str, ...] = ()


class RefusedError(BackendError):
    def __init__(self, problem: Problem, status: int) -> None:
        super().__init__(problem)
        self.status = status


class UnusableAnswerError(BackendError):
    """The answers to a request cannot be trained on."""


class Client:
    """The connections to the servers of one engine. Every method raises BackendError when retries did not help."""

    def __init__(self, settings: Settings) -> None:
        self._table = table = settings.table
        self._loop = asyncio.new_event_loop()
        self.pool = Pool(settings.urls, max_concurrent=table.max_concurrent, retry_s=table.retry_s)
        self.admin_urls = settings.admin_urls
        self._connections = Connections((*settings.urls, *settings.admin_urls), settings.headers)
        self.retries = 0
        self._thread = threading.Thread(target=self._loop.run_forever, name="inference", daemon=True)
        self._thread.start()

    def run(
        self, calls: Sequence[Call[T]], check_stop: Callable[[], None] | None = None
    ) -> Iterator[list[tuple[int, T]]]:
        """Send all calls; yields (index, result) of those that have finished since the last yield, until all have.

        The first failure cancels the rest. `check_stop` is called at every poll.
        """
        done: queue.SimpleQueue[tuple[int, T | BaseException]] = queue.SimpleQueue()

        async def started() -> asyncio.Task[None]:
            return asyncio.create_task(self._send_all(calls, done))

        task = self.call(started())
        left = len(calls)
        try:
            while left:
                # Everything that has finished; waits up to one poll for the first.
                batch = list[tuple[int, T | BaseException]]()
                with suppress(queue.Empty):
                    batch.append(done.get(timeout=POLL_S))
                    while True:
                        batch.append(done.get_nowait())
                if check_stop is not None:
                    check_stop()
                for _, result in batch:
                    if isinstance(result, BaseException):
                        raise result
                if batch:
                    left -= len(batch)
                    yield batch  # type: ignore[misc]
        finally:
            self.call(_cancelled(task))

    def results(self, calls: Sequence[Call[T]]) -> list[T]:
        found = dict(pair for batch in self.run(calls) for pair in batch)
        return [found[index] for index in range(len(calls))]

    def outcomes(self, calls: Sequence[Call[T]]) -> list[T | BackendError]:

        async def outcome(call: Call[T]) -> T | BackendError:
            try:
                return await self.send(call)
            except BackendError as error:
                return error

        async def gathered() -> list[T | BackendError]:
            return list(await asyncio.gather(*map(outcome, calls)))

        return self.call(gathered())

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def do(self, action: Callable[..., None], *arguments: Any) -> None:
        """Call a function in the loop of the client, to which servers and pool belong."""

        async def run() -> None:
            action(*arguments)

        self.call(run())

    def close(self) -> None:
        if not self._thread.is_alive():
            return
        with suppress(Exception):  # nothing depends on a connection that cannot be closed
            asyncio.run_coroutine_threadsafe(self._connections.close(), self._loop).result(JOIN_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(JOIN_S)
        if not self._thread.is_alive():
            self._loop.close()

    async def send(self, call: Call[T]) -> T:
        """Send one call, retried for as long as the settings allow; only in this client's own loop."""
        loop = asyncio.get_running_loop()
        retry_s = 0.0 if call.once else self._table.retry_s
        timeout_s = call.timeout_s if call.once else self._table.timeout_s
        deadline, attempts, bad_answers = math.inf, 0, 0
        failure: _TransientError | None = None
        asked: Server | None = None
        while True:
            refused = None
            try:
                async with self.pool.slot(call.server, call.key) as server:
                    # As long as any server samples, the request can wait for it.
                    if call.key:
                        deadline = max(deadline, self.pool.sampled_at + retry_s)
                    if failure is not None and loop.time() >= deadline:
                        raise self._gave_up(call, server, failure, attempts, is_late=True)
                    attempts += 1
                    self.pool.moved += asked is not None and asked is not server
                    asked = server
                    try:
                        return await self._attempt(call, server, min(timeout_s, deadline - loop.time()))
                    except _TransientError as error:
                        failure = error
                    except RefusedError as error:
                        refused, failure = error, _TransientError(error.problems[0].what)
            except NoServerError as error:
                what = f"{call.label or call.path} failed: no server has the policy that it needs"
                why = f"[inference] retry_s = {retry_s:g} ended the wait; {error}"
                fix = "start the servers again, with the same options; then resume the run"
                where = "[inference] url"
                raise BackendError(Problem(code="engine.no-server", where=where, what=what, why=why, fix=fix)) from None
            if refused is not None:
                call = self._without_cause(call, server, refused)
            self.retries += 1
            bad_answers += failure.is_bad_answer
            deadline = min(deadline, loop.time() + retry_s)
            if call.key:
                deadline = max(deadline, self.pool.sampled_at + retry_s)
            pause_s = jittered(max(0.0, server.backoff_until - loop.time())) if call.server else 0.0
            is_late = loop.time() + pause_s >= deadline
            if is_late or bad_answers >= MAX_BAD_ANSWERS * len(self.pool.servers):
                raise refused or self._gave_up(call, server, failure, attempts, is_late=is_late)
            await asyncio.sleep(pause_s)

    def _without_cause(self, call: Call[T], server: Server, refused: RefusedError) -> Call[T]:
        """Return the call to send again after a refusal; raise the refusal where that would not help."""
        if refused.status != NOT_FOUND or not (call.fallback_path or call.key):
            raise refused
        if not call.fallback_path:
            self.pool.lose(server, "it lost the policy, as after a restart")
            return call
        self.pool.back_off(server)
        return replace(call, path=call.fallback_path, fallback_path=call.path)

    def _gave_up(
        self, call: Call[Any], server: Server, failure: _TransientError, attempts: int, *, is_late: bool
    ) -> BackendError:
        where, what, fix = server.name, f"{call.label or call.path} failed: {failure}", "read the server's log"
        if failure.is_bad_answer:
            what = f"{call.label or call.path} returned unusable answers: {failure}"
            why = f"tried {attempts} times; none of the answers was trained on"
            return UnusableAnswerError(Problem(code="engine.bad-answers", where=where, what=what, why=why, fix=fix))
        why = f"tried {attempts} times; [inference] retry_s = {self._table.retry_s:g} ended it" if is_late else ""
        if failure.was_reached:
            return BackendError(Problem(code="engine.request-failed", where=where, what=what, why=why, fix=fix))
        fix = "start the server, or correct [inference] url"
        return BackendError(Problem(code="engine.unreachable", where=where, what=what, why=why, fix=fix))

    async def _exchange(self, call: Call[Any], server: Server) -> httpx.Response:
        """Return the response; of several, the first refusal that does not mean that the work is done."""
        urls = call.urls or (server.url,)
        responses = [await self._connections.exchange(url, call.path, call.body) for url in urls]
        is_done = call.is_done or (lambda message: False)
        refusals = (each for each in responses if each.status_code >= 300 and not is_done(_message(each)))
        return next(refusals, responses[-1])

    async def _attempt(self, call: Call[T], server: Server, timeout_s: float) -> T:
        if call.addressed is not None:
            call = replace(call.addressed(server), key=call.key)
        loop, losses = asyncio.get_running_loop(), server.losses
        started = loop.time()
        try:
            async with asyncio.timeout(max(0.0, timeout_s)) as limit:
                with _listed(limit, server, is_moving=call.key != ""):
                    response = await self._exchange(call, server)
        except TimeoutError:
            raise self._failed(server, f"no answer within {loop.time() - started:.3g} s") from None
        except httpx.HTTPError as error:
            text, was_reached = f"{type(error).__name__}: {error}", not isinstance(error, httpx.ConnectError)
            raise self._failed(server, text.removesuffix(": "), was_reached=was_reached) from None
        if response.status_code == TOO_MANY:
            self.pool.reduce_room(server)
        if response.status_code in TRANSIENT or (
            response.status_code >= 500 and response.status_code != NOT_IMPLEMENTED
        ):
            text = f"HTTP {response.status_code}: {_message(response)}"
            if response.status_code not in TRANSIENT:
                raise self._failed(server, text, at_least_s=_retry_after_s(response))
            self.pool.back_off(server, at_least_s=_retry_after_s(response))
            raise _TransientError(text)
        took_s = loop.time() - started if call.key else None
        self.pool.answered(server, took_s=took_s, has_sampled=call.body is not None)
        # Before a refusal is read: a late 404 would count as a second loss, after the keeper made good the first.
        if call.key and losses != server.losses:
            raise _TransientError("the server lost the policy before it answered")
        if response.status_code >= 300:
            if call.is_done is not None and call.is_done(_message(response)):
                return call.read(None)
            what = f"{call.label or call.path} was refused with HTTP {response.status_code}: {_message(response)}"
            fix = "look at the server's log and its options"
            problem = Problem(code="engine.request-refused", where=server.name, what=what, fix=fix)
            if response.status_code in (401, 403):
                fix = "set [inference] api_key_env to the environment variable that holds the server's key"
                problem = Problem(code="engine.key-refused", where=server.name, what=what, fix=fix)
            raise RefusedError(problem, response.status_code)
        return self._read(call, server, response)

    def _failed(
        self, server: Server, text: str, *, was_reached: bool = True, at_least_s: float = 0.0
    ) -> _TransientError:
        self.pool.back_off(server, at_least_s=at_least_s)
        self.pool.failed(server, text)
        return _TransientError(text, was_reached=was_reached)

    def _read(self, call: Call[T], server: Server, response: httpx.Response) -> T:
        try:
            found = None
            if not call.ignores_answer:
                try:
                    found = json.loads(response.content or b"{}")
                except (ValueError, RecursionError) as error:
                    raise BadAnswerError(f"the answer is not JSON: {error}") from None
            return call.read(found)
        except BadAnswerError as error:
            if isinstance(error, OtherModelError) and call.key:
                self.pool.lose(server, str(error))
            elif len(self.pool.servers) > 1:
                self.pool.back_off(server)
            raise _TransientError(str(error), is_bad_answer=True) from None

    async def _send_all(self, calls: Sequence[Call[T]], done: queue.SimpleQueue[tuple[int, T | BaseException]]) -> None:
        async def send_one(index: int, call: Call[T]) -> None:
            try:
                result: T = await self.send(call)
                done.put((index, result))
            except Exception as error:  # re-raised in the caller's thread
                done.put((index, error))

        async with asyncio.TaskGroup() as group:
            for index, call in enumerate(calls):
                group.create_task(send_one(index, call))


class _TransientError(Exception):
    def __init__(self, text: str, *, is_bad_answer: bool = False, was_reached: bool = True) -> None:
        super().__init__(text)
        self.is_bad_answer = is_bad_answer
        self.was_reached = was_reached


@contextmanager
def _listed(limit: asyncio.Timeout, server: Server, *, is_moving: bool) -> Iterator[None]:
    """End a request that another server could answer as soon as this one is found dead."""
    if is_moving:
        server.limits.add(limit)
    try:
        yield
    finally:
        server.limits.discard(limit)


async def _cancelled(task: asyncio.Task[None]) -> None:
    """Cancel and wait until nothing is in flight, so that the servers may be changed."""
    task.cancel()
    await asyncio.wait({task}, timeout=JOIN_S)


def _message(response: httpx.Response) -> str:
    text = response.text
    with suppress(ValueError, AttributeError, TypeError):
        found = json.loads(text)
        error = found.get("error", found) if isinstance(found, dict) else found
        text = str(error.get("message") or error.get("detail") or error) if isinstance(error, dict) else str(error)
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())[:300] or "no reason given"


def _retry_after_s(response: httpx.Response) -> float:
    try:
        seconds = float(response.headers.get("retry-after", "0"))
    except ValueError:  # a date: the pool's own pause is enough
        return 0.0
    # A server may ask for days, or write NaN: then the pool's own pauses count.
    return seconds if 0.0 <= seconds < 3600.0 else 0.0


class Connections:
    """Keep-alive connections by server. Proxies and .netrc of the environment are ignored.

    The pool inside `httpx` scans all of its connections several times per request: milliseconds, once there are
    hundreds. Here each connection is its own transport, and finding a free one costs nothing.
    """

    def __init__(self, urls: Sequence[str], headers: Mapping[str, str]) -> None:
        self._headers = {"Accept": "application/json", "Content-Type": "application/json", **headers}
        is_encrypted = any(url.startswith("https://") for url in urls)
        # shared: each transport would otherwise make its own, and reading the certificates takes 50 ms
        self._tls = httpx.create_ssl_context() if is_encrypted else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._free: dict[str, list[httpx.AsyncHTTPTransport]] = defaultdict(list)

    async def exchange(self, url: str, path: str, body: Mapping[str, Any] | None) -> httpx.Response:
        """GET, or POST a JSON body, and read the whole response. httpx.HTTPError when the connection fails."""
        request = httpx.Request(
            "GET" if body is None else "POST",
            url + path,
            headers=self._headers,
            content=None if body is None else json.dumps(body).encode(),
        )
        # A bare transport ignores the login in a URL; httpx's client would send it.
        if request.url.userinfo:
            request = next(httpx.BasicAuth(request.url.username, request.url.password).auth_flow(request))
        free = self._free[url]
        transport = free.pop() if free else httpx.AsyncHTTPTransport(verify=self._tls, trust_env=False)
        try:
            response = await transport.handle_async_request(request)
            await response.aread()
            await response.aclose()
        # Cancelled or broken: unread bytes of this answer would be taken for the next one's.
        except BaseException:
            with suppress(Exception):
                await transport.aclose()
            raise
        free.append(transport)
        return response

    async def close(self) -> None:
        for free in self._free.values():
            while free:
                with suppress(httpx.HTTPError):
                    await free.pop().aclose()
