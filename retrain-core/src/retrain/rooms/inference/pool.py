"""Several servers share the load: the least loaded gets the next request, a failing one is left alone for a while."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import urlsplit

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.25, 8.0


@dataclass(slots=True, kw_only=True, eq=False)
class Server:
    """One server. `name` is its URL without a login, fit for messages. Times are those of the event loop.

    `room` is how many requests it accepts at a time, learnt from its refusals: each one halves it, and every `room`
    answers add one.
    """

    url: str
    name: str
    load: int = 0
    room: float = math.inf
    failures: int = 0  # in a row
    backoff_until: float = 0.0

    @classmethod
    def at(cls, url: str) -> Server:
        """The server at a URL."""
        parts = urlsplit(url)
        return cls(url=url, name=parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())


class Pool:
    """The servers of an engine, used from one event loop; `max_concurrent` requests in flight over all of them."""

    def __init__(self, urls: Sequence[str], *, max_concurrent: int) -> None:
        self.servers = tuple(Server.at(url) for url in urls)
        self._slots = asyncio.Semaphore(max_concurrent)
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def slot(self, pinned: Server | None = None) -> AsyncIterator[Server]:
        """A slot for the duration of the block: on `pinned`, or on the least loaded server that is not backing off."""
        async with self._slots:
            server = pinned or await self._choose()
            server.load += 1
            try:
                yield server
            finally:
                server.load -= 1
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
        pause_s = min(FIRST_PAUSE_S * 2 ** min(server.failures - 1, 16), LONGEST_PAUSE_S)
        server.backoff_until = max(server.backoff_until, now + max(pause_s, at_least_s))

    def reduce_room(self, server: Server) -> None:
        """The server refused a request because it is busy."""
        if asyncio.get_running_loop().time() >= server.backoff_until:
            server.room = max(1.0, min(server.room, server.load) / 2)

    def answered(self, server: Server) -> None:
        """The server answered a request."""
        server.failures, server.backoff_until = 0, 0.0
        server.room += 1.0 / server.room

    async def _choose(self) -> Server:
        while True:
            now = asyncio.get_running_loop().time()
            ready = [server for server in self.servers if server.backoff_until <= now and server.load < server.room]
            if ready:
                return min(ready, key=lambda server: server.load)
            waits_s = [server.backoff_until - now for server in self.servers if server.backoff_until > now]
            self._freed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(jittered(min(waits_s)) if waits_s else None):
                    await self._freed.wait()


def jittered(pause_s: float) -> float:
    """Up to a quarter longer, so that requests that failed together do not return together."""
    return pause_s * (1.0 + secrets.randbelow(1000) / 4000)  # not from a run's streams: it changes timing only
