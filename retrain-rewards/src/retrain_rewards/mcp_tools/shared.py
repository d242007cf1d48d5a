"""Servers that all episodes share: started once, and again after one of them has died."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from retrain_rewards.mcp_tools.servers import ServerDiedError, Toolbox, open_toolbox
from retrain_rewards.mcp_tools.settings import McpSettings


class SharedServers:
    """One set of servers for all episodes of an event loop, kept open by a task of its own."""

    def __init__(self, settings: McpSettings) -> None:
        self._settings = settings
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Toolbox] | None = None
        self._given_up = asyncio.Event()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Toolbox]:
        """The toolbox of all; when a server dies under its user, the next one who enters gets new servers."""
        if self._holder is None or self._holder.done() or self._given_up.is_set():
            self._given_up = asyncio.Event()
            self._ready = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._ready, self._given_up))
        assert self._ready is not None
        given_up = self._given_up
        toolbox = await asyncio.shield(self._ready)
        try:
            yield toolbox
        except ServerDiedError:
            given_up.set()
            raise

    async def _hold(self, ready: asyncio.Future[Toolbox], given_up: asyncio.Event) -> None:
        try:
            async with open_toolbox(self._settings) as toolbox:
                ready.set_result(toolbox)
                await given_up.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
