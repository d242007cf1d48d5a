"""The servers of an engine: their state, and which one gets the next request.

The server that will probably answer first is next. A failing one gets a pause, one that has not answered for
`DEAD_AFTER_S` is dead until it answers again, and a request for a policy version goes only to servers that have been
shown to hold it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from urllib.parse import urlsplit

LOG = logging.getLogger("retrain")
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0  # twice as long after each failure in a row
DEAD_AFTER_S = 10.0
NEW_SHARE = 0.1  # of the latest answer in the average of their durations


class NoServerError(Exception):
    """No server can take the request; the text has each server's last failure."""


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """One server. `name` is its URL without a login, fit for messages. Times are the event loop's.

    `room` is the number of requests it accepts at a time: each refusal halves it, and every `room` answers add one.
    `names` are the policy versions loaded on it, under the names they have there; `held` are the ones that it was shown
    to sample from. `losses` counts how often it lost them.
    """

    url: str
    name: str
    load: int = 0
    room: float = math.inf
    answer_s: float = 0.0  # how long an answer takes, on average; 0 = not known
    failures: int = 0  # in a row
    backoff_until: float = 0.0
    failure: str = ""  # the last one
    failing_since: float = math.inf
    answered_at: float = -math.inf
    is_dead: bool = False
    is_rejected: bool = False  # it answers, and wrongly
    names: dict[str, str] = field(default_factory=dict)
    held: set[str] = field(default_factory=set)
    has_weights: bool = False  # other ones than it starts with, under the same name
    losses: int = 0
    changed: asyncio.Event = field(default_factory=asyncio.Event)  # its keeper has something to do
    limits: set[asyncio.Timeout] = field(default_factory=set)  # of the requests in flight that may move

    @classmethod
    def at(cls, url: str) -> Server:
        parts = urlsplit(url)
        return cls(url=url, name=parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())


class Pool:
    """The servers of an engine, used from one event loop; `max_concurrent` requests in flight over all of them.

    `moved` counts the requests that were repeated on another server.
    """

    def __init__(self, urls: Sequence[str], *, max_concurrent: int, retry_s: float = math.inf) -> None:
        self.servers = tuple(Server.at(url) for url in urls)
        self.moved = 0
        self.sampled_at = -math.inf  # when the last completion came, from any server
        self.is_watched = False  # by keepers, who notice the return of a dead server
        self._retry_s = retry_s
        self._slots = asyncio.Semaphore(max_concurrent)
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def slot(self, pinned: Server | None = None, key: str = "") -> AsyncIterator[Server]:
        """Hold a slot for the duration of the block: on `pinned`, or on the server that will probably answer first.

        NoServerError when no server was available for `retry_s`. Pinned requests find out whether servers work, so they
        do not queue behind those that wait for one.
        """
        async with nullcontext() if pinned else self._slots:
            server = pinned or await self._choose(key)
            server.load += 1
            try:
                yield server
            finally:
                server.load -= 1
                self.notify()

    def notify(self) -> None:
        self._freed.set()

    def back_off(self, server: Server, *, at_least_s: float = 0.0) -> None:
        """Send nothing to a server after a failure, for twice as long each time in a row.

        Of many requests that fail together only the first counts.
        """
        now = asyncio.get_running_loop().time()
        if now < server.backoff_until and not at_least_s:
            return
        if now >= server.backoff_until:
            server.failures += 1
        # The exponent is bounded: after days of failures the power would not fit in a float.
        pause_s = min(FIRST_PAUSE_S * 2 ** min(server.failures - 1, 16), LONGEST_PAUSE_S)
        server.backoff_until = max(server.backoff_until, now + max(pause_s, at_least_s))

    def reduce_room(self, server: Server) -> None:
        # Count only the first of many requests that are refused together.
        if asyncio.get_running_loop().time() >= server.backoff_until:
            server.room = max(1.0, min(server.room, server.load) / 2)

    def answered(self, server: Server, *, took_s: float | None = None, has_sampled: bool = True) -> None:
        """Record an answer; with `has_sampled=False` it proves nothing about sampling."""
        now = asyncio.get_running_loop().time()
        server.answered_at, server.failing_since = now, math.inf
        server.is_dead = False
        if has_sampled:
            server.failures, server.backoff_until = 0, 0.0
            # As TCP avoids congestion: halved at a refusal, then one more per `room` answers.
            server.room += 1.0 / server.room
        if took_s is not None:
            self.sampled_at = now
            share = NEW_SHARE if server.answer_s else 1.0
            server.answer_s += share * (took_s - server.answer_s)

    def failed(self, server: Server, text: str) -> None:
        """Record that the server could not be reached, or does not work; after `DEAD_AFTER_S` of it, it is dead.

        Requests in flight on a dead server end, so that they can move to other servers, if there are any.
        """
        now = asyncio.get_running_loop().time()
        server.failure, server.failing_since = text, min(server.failing_since, now)
        server.is_rejected = False  # it may be restarted
        # Restarted, it would answer with the weights that it starts with, under the same name.
        if server.has_weights:
            self.lose(server, text)
        if server.is_dead or not self.is_watched or now - server.failing_since < DEAD_AFTER_S:
            return
        server.is_dead = True
        self.lose(server, text)  # it will probably be restarted
        LOG.warning("%s has not answered for %.0f s: %s.", server.name, now - server.failing_since, text)
        if any(not other.is_dead for other in self.servers):
            for limit in [limit for limit in server.limits if not limit.expired()]:
                limit.reschedule(now)
        self.notify()

    def lose(self, server: Server, why: str) -> None:
        """Record that the server lost its versions; its keeper brings them back."""
        if not server.names:
            return  # known
        server.names.clear()
        server.held.clear()
        server.losses += 1
        server.failure = why
        server.changed.set()

    def serving(self, key: str) -> list[Server]:
        """The servers that can answer for a policy version; an empty key needs none in particular."""
        return [server for server in self.servers if not server.is_dead and (not key or key in server.held)]

    def failures(self) -> str:
        return "; ".join(f"{server.name}: {server.failure or 'no failure so far'}" for server in self.servers)

    async def _choose(self, key: str) -> Server:
        loop, unserved_since = asyncio.get_running_loop(), math.inf
        while True:
            now, serving = loop.time(), self.serving(key)
            ready = [server for server in serving if server.backoff_until <= now and server.load < server.room]
            if ready:
                # the one that will probably answer first: answers take longer the more it has to do
                unknown_s = min((server.answer_s for server in ready if server.answer_s), default=1.0)
                return min(ready, key=lambda server: (server.load + 1) * (server.answer_s or unknown_s))
            unserved_since = math.inf if serving else min(unserved_since, now)
            if now - unserved_since >= self._retry_s or all(server.is_rejected for server in self.servers):
                raise NoServerError(self.failures())
            waits_s = [server.backoff_until - now for server in serving if server.backoff_until > now]
            if not serving:
                waits_s.append(unserved_since + self._retry_s - now)
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(jittered(min(waits_s)) if waits_s and min(waits_s) < math.inf else None):
                    await self._freed.wait()


def jittered(pause_s: float) -> float:
    """Return a pause up to a quarter longer, so that requests that failed together do not return together."""
    # Not from a run's random streams: it changes only timing.
    return pause_s * (1.0 + secrets.randbelow(1000) / 4000)
