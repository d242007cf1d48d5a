"""Opens MCP servers, one set for each episode or for all, and calls their tools: results as text for the policy.

An error is returned to the policy where the call is at fault, and otherwise ends the episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, TextIO, TypeVar

import anyio
import httpx
import mcp
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult

from retrain_rewards.environments.mcp_settings import McpSettings, ServerTable

Answer = TypeVar("Answer")
# A server that takes longer to answer a ping is given up.
PING_TIMEOUT_S = 5.0
# Pages of a tool list: a faulty server may return cursors without end.
MAX_PAGES = 100
# For a server to end; the library terminates it after 2 s and kills it after 2 more.
END_S = 10.0
LOG_TAIL = 3  # last lines of a server's stderr, in the message of its failure


class ServerDiedError(Exception):
    """A server could not be started, has ended, or no longer answers."""


class Server:
    """One server, held by a dedicated task: the library cancels the task that holds a server when it ends."""

    def __init__(self, name: str, table: ServerTable) -> None:
        self.name = name
        self._end = "has ended" if table.command else "no longer answers"
        self._last_words = ""
        self._started: asyncio.Future[mcp.ClientSession] = asyncio.get_running_loop().create_future()
        self._holder = asyncio.create_task(self._hold(table))

    async def ask(self, question: Callable[[mcp.ClientSession], Awaitable[Answer]], limit_s: float) -> Answer:
        """Return the answer; TimeoutError after `limit_s`, ServerDiedError however the server ends before it."""

        async def answer() -> Answer:
            return await question(await asyncio.shield(self._started))

        asked = asyncio.create_task(answer())
        try:
            await asyncio.wait((asked, self._holder), timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            asked.cancel()
        if asked.done():
            if not _is_end(asked.exception()):
                return asked.result()
        elif not self._holder.done():
            raise TimeoutError
        raise await self.died()

    async def died(self, what: str = "") -> ServerDiedError:
        """End the server, so that none of its last words is missing, and return the error that quotes them."""
        error = await self.end()
        if not what:
            has_failed = not self._started.done() and error is not None and not _is_end(error)
            what = f"cannot be used: {error}" if has_failed else self._end
        said = f"; it said: {self._last_words}" if self._last_words else ""
        return ServerDiedError(f"server {self.name!r} {what}{said}")

    async def end(self) -> BaseException | None:
        """End the server if it has not ended, and return its first error."""
        if not self._holder.cancelling():  # a second time would cut the clean-up short
            self._holder.cancel()
        await asyncio.wait((self._holder,), timeout=END_S)
        error = self._holder.exception() if self._holder.done() and not self._holder.cancelled() else None
        while isinstance(error, BaseExceptionGroup):  # the tasks that read and write wrap their errors
            error = error.exceptions[0]
        return error

    async def _hold(self, table: ServerTable) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:  # of its stderr
            try:
                async with AsyncExitStack() as stack:
                    session = await _connected(table, log, stack)
                    await session.initialize()
                    self._started.set_result(session)
                    await asyncio.Event().wait()
            finally:
                log.seek(0)
                lines = log.read()[-4000:].splitlines()[-LOG_TAIL:]
                self._last_words = " | ".join(line.strip() for line in lines if line.strip())


def _is_end(error: BaseException | None) -> bool:
    """True for each error that the library raises when a server has ended: its scheduling decides which one."""
    if isinstance(error, mcp.McpError):
        return bool(error.error.code == CONNECTION_CLOSED)
    return isinstance(error, (anyio.ClosedResourceError, anyio.BrokenResourceError, ConnectionError))


class Toolbox:
    """The tools of open servers: their `schemas` as the chat template takes them, and a way to call them."""

    def __init__(self, settings: McpSettings) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.names: dict[str, list[str]] = {}  # of the tools, by server
        self._settings = settings
        self._open = [Server(name, table) for name, table in settings.table.servers.items()]
        self._servers: dict[str, Server] = {}  # by tool

    @classmethod
    async def opened(cls, settings: McpSettings) -> Toolbox:
        """Start or reach every server; ServerDiedError names the first that cannot be used."""
        toolbox = cls(settings)
        try:
            for server in toolbox._open:
                await toolbox._add(server, settings.timeout_s)
        except BaseException:
            await toolbox.end()
            raise
        return toolbox

    async def end(self) -> None:
        await asyncio.gather(*(server.end() for server in self._open))

    async def _add(self, server: Server, limit_s: float) -> None:
        try:
            found = {tool.name: tool for tool in await server.ask(_tools_of, limit_s)}
        except TimeoutError:
            raise await server.died(f"has not started within {limit_s:g} s") from None
        except (mcp.McpError, RuntimeError, ValueError) as error:
            raise await server.died(f"cannot be used: {error}") from error
        names = list(self._settings.table.servers[server.name].tools or found)
        if missing := [name for name in names if name not in found]:
            known = ", ".join(found) or "none"
            raise ServerDiedError(f"server {server.name!r} has no tool {missing[0]!r}, only: {known}")
        for name in names:
            if name in self._servers:
                both = f"{self._servers[name].name!r} and {server.name!r}"
                raise ServerDiedError(f"servers {both} both have a tool {name!r}: leave it out of the tools of one")
            self._servers[name] = server
            tool = found[name]
            function = {"name": name, "description": tool.description or "", "parameters": tool.inputSchema}
            self.schemas.append({"type": "function", "function": function})
        self.names[server.name] = names

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Return the result or `error: ...` as text; ServerDiedError when its server has ended or answers no ping."""
        server = self._servers.get(name)
        if server is None:
            return f"error: there is no tool {name!r}; there are: {', '.join(self._servers)}"
        limit_s = self._settings.table.call_timeout_s
        try:
            result = await server.ask(lambda session: session.call_tool(name, dict(arguments)), limit_s)
        except TimeoutError:
            try:
                await server.ask(lambda session: session.send_ping(), PING_TIMEOUT_S)
            except (TimeoutError, mcp.McpError):
                raise await server.died("no longer answers") from None
            return f"error: {name} took longer than {limit_s:g} s"
        except mcp.McpError as error:
            return f"error: {error.error.message}"
        # The client refuses a result that breaks the tool's own schema: the call is at fault, not the server.
        except (RuntimeError, ValueError) as error:
            return f"error: {error}"
        return text_of_result(result)


@asynccontextmanager
async def open_toolbox(settings: McpSettings) -> AsyncIterator[Toolbox]:
    """Offer the tools of servers that end with the block; ServerDiedError says which one failed, now or later."""
    toolbox = await Toolbox.opened(settings)
    try:
        yield toolbox
    finally:
        await toolbox.end()


async def _connected(table: ServerTable, log: TextIO, stack: AsyncExitStack) -> mcp.ClientSession:
    if table.url:
        headers = {header: os.environ.get(name, "") for header, name in table.headers_env.items()}
        client = await stack.enter_async_context(httpx.AsyncClient(headers=headers, timeout=None))
        read, write, _ = await stack.enter_async_context(streamable_http_client(table.url, http_client=client))
    else:
        passed = {name: os.environ[name] for name in table.pass_env if name in os.environ}
        program, *arguments = table.command
        parameters = StdioServerParameters(
            command=program,
            args=arguments,
            env={**passed, **table.env},
            cwd=table.cwd or None,
            encoding_error_handler="replace",
        )
        read, write = await stack.enter_async_context(stdio_client(parameters, errlog=log))
    return await stack.enter_async_context(mcp.ClientSession(read, write))


async def _tools_of(session: mcp.ClientSession) -> list[mcp.Tool]:
    tools: list[mcp.Tool] = []
    cursor: str | None = None
    for _ in range(MAX_PAGES):
        page = await session.list_tools(cursor)
        tools += page.tools
        cursor = page.nextCursor
        if cursor is None:
            break
    return tools


def text_of_result(result: CallToolResult) -> str:
    texts = []
    for block in result.content:
        shown: Any = getattr(block, "resource", block)
        if (text := getattr(shown, "text", None)) is None and block.type == "resource_link":
            text = f"[link to {block.name}: {block.uri}]"
        if text is None:
            base64 = shown.blob if block.type == "resource" else shown.data
            # Base64 has four characters for three bytes.
            text = f"[{shown.mimeType or 'data'}, {len(base64) * 3 // 4} bytes, not shown]"
        texts.append(str(text))
    text = "\n".join(texts)
    if not result.content and result.structuredContent is not None:
        text = json.dumps(result.structuredContent)
    return f"error: {text}" if result.isError else text


class SharedServers:
    """One set of servers for all episodes of an event loop."""

    def __init__(self, settings: McpSettings) -> None:
        self._settings = settings
        self._opening: asyncio.Task[Toolbox] | None = None

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Toolbox]:
        """Yield the shared toolbox; when a server dies under its user, the next one who enters gets new servers."""
        if self._opening is None:
            self._opening = asyncio.create_task(Toolbox.opened(self._settings))
        # Kept, because another user may replace the servers while this one waits.
        opening = self._opening
        try:
            # Shielded: an episode that is cut must not cancel the start that others wait for.
            yield await asyncio.shield(opening)
        except ServerDiedError:
            if self._opening is opening:
                self._opening = None
            if opening.exception() is None:
                await opening.result().end()
            raise
