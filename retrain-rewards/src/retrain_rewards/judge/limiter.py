"""Keeps calls below a rate of requests and of tokens per minute."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

MINUTE_S = 60.0


class Limiter:
    """Lets callers through one by one, in the order in which they came, spaced evenly; 0 = unlimited.

    A caller that is cancelled while it waits delays nobody. One limiter serves all callers of an event loop.
    """

    def __init__(
        self,
        requests_per_minute: int,
        tokens_per_minute: int,
        *,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._request_s = MINUTE_S / requests_per_minute if requests_per_minute else 0.0
        self._token_s = MINUTE_S / tokens_per_minute if tokens_per_minute else 0.0
        self._clock = clock
        self._sleep = sleep
        self._turn = asyncio.Lock()  # serves its waiters in order
        self._free_at = 0.0  # when the next request may go
        self._paid_at = 0.0  # when the rate has made up for all tokens so far

    async def wait(self, tokens: int) -> None:
        """Return when the next call, of about `tokens` tokens, may be sent."""
        if not self._request_s and not self._token_s:
            return
        async with self._turn:
            delay = max(self._free_at, self._paid_at) - self._now()
            if delay > 0.0:
                await self._sleep(delay)
            now = self._now()
            self._free_at = max(self._free_at, now) + self._request_s
            self._paid_at = max(self._paid_at, now) + tokens * self._token_s

    def settle(self, tokens: int) -> None:
        """Correct an estimate by `tokens` more than announced (fewer when negative)."""
        self._paid_at += tokens * self._token_s

    def _now(self) -> float:
        return self._clock() if self._clock is not None else asyncio.get_running_loop().time()
