"""Opens MCP servers, one set for each episode or for all, and calls their tools: results as text for the policy.

An error is returned to the policy where the call is at fault, and otherwise ends the episode.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, TextIO

import anyio
import httpx
import mcp
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp.client.streamable_http import streamable_http_client
from mcp.types import CONNECTION_CLOSED, CallToolResult

from retrain_rewards.environments.mcp_settings import McpSettings, ServerTable

# A server that takes longer to answer a ping is given up.
PING_TIMEOUT_S = 5.0
# Pages of a tool list: a faulty server may return cursors without end.
MAX_PAGES = 100
GONE = (anyio.ClosedResourceError, anyio.BrokenResourceError)
LOG_TAIL = 3  # last lines of a server's stderr, in the message of its failure


class ServerDiedError(RuntimeError):
    """A server could not be started, has ended, or no longer answers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Server:
    name: str
    session: mcp.ClientSession
    log: TextIO


class Toolbox:
    """The tools of open servers: their `schemas` as the chat template takes them, and a way to call them."""

    def __init__(self, settings: McpSettings) -> None:
        self.schemas: list[dict[str, Any]] = []
        self.names: dict[str, list[str]] = {}  # of the tools, by server
        self._settings = settings
        self._servers: dict[str, _Server] = {}  # by tool

    async def add(self, server: _Server, wanted: Sequence[str]) -> None:
        found = {tool.name: tool for tool in await _tools_of(server.session)}
        names = list(wanted or found)
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
            with anyio.fail_after(limit_s):
                result: CallToolResult = await server.session.call_tool(name, dict(arguments))
        except TimeoutError:
            try:
                with anyio.fail_after(PING_TIMEOUT_S):
                    await server.session.send_ping()
            except (TimeoutError, mcp.McpError, *GONE) as error:
                raise _died(server.name, server.log, "no longer answers") from error
            return f"error: {name} took longer than {limit_s:g} s"
        except mcp.McpError as error:
            if error.error.code == CONNECTION_CLOSED:
                raise _died(server.name, server.log) from error
            return f"error: {error.error.message}"
        except GONE as error:
            raise _died(server.name, server.log) from error
        # The client refuses a result that breaks the tool's own schema: the call is at fault, not the server.
        except (RuntimeError, ValueError) as error:
            return f"error: {error}"
        return text_of_result(result)


@asynccontextmanager
async def open_toolbox(settings: McpSettings) -> AsyncIterator[Toolbox]:
    """Start or reach every server and offer its tools; ServerDiedError says which one failed, now or later.

    Servers end with the block. It must be left in the task that has entered it.
    """
    toolbox = Toolbox(settings)
    try:
        async with AsyncExitStack() as stack:
            for name, table in settings.table.servers.items():
                written = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - to stderr
                log: Any = stack.enter_context(written)
                try:
                    session = await _connected(table, log, stack)
                    with anyio.fail_after(settings.timeout_s):
                        await session.initialize()
                        await toolbox.add(_Server(name=name, session=session, log=log), table.tools)
                except TimeoutError as error:
                    raise _died(name, log, f"has not started within {settings.timeout_s:g} s") from error
                except (OSError, mcp.McpError, httpx.HTTPError, *GONE) as error:
                    raise _died(name, log, f"cannot be used: {error}") from error
            yield toolbox
    except BaseExceptionGroup as group:  # the tasks that read and write wrap their errors
        first: BaseException = group
        while isinstance(first, BaseExceptionGroup):
            first = first.exceptions[0]
        if isinstance(first, ServerDiedError):
            raise first from group
        names = " or ".join(repr(name) for name in settings.table.servers)
        raise ServerDiedError(f"server {names} cannot be used: {first!r}") from group


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


def _died(name: str, log: TextIO, what: str = "has ended") -> ServerDiedError:
    tail = ""
    # Closed once another of its users has found out.
    if not log.closed:
        log.seek(0)
        tail = " | ".join(line.strip() for line in log.read()[-4000:].splitlines()[-LOG_TAIL:] if line.strip())
    return ServerDiedError(f"server {name!r} {what}" + (f"; it said: {tail}" if tail else ""))


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
    """One set of servers for all episodes of an event loop, kept open by a dedicated task."""

    def __init__(self, settings: McpSettings) -> None:
        self._settings = settings
        self._holder: asyncio.Task[None] | None = None
        self._ready: asyncio.Future[Toolbox] | None = None
        self._given_up = asyncio.Event()

    @asynccontextmanager
    async def use(self) -> AsyncIterator[Toolbox]:
        """Yield the shared toolbox; when a server dies under its user, the next one who enters gets new servers."""
        if self._holder is None or self._holder.done() or self._given_up.is_set():
            self._given_up = asyncio.Event()
            self._ready = asyncio.get_running_loop().create_future()
            self._holder = asyncio.create_task(self._hold(self._ready, self._given_up))
        assert self._ready is not None
        # Kept, because another user may replace the servers while this one waits.
        given_up = self._given_up
        # Shielded: an episode that is cut must not cancel the start that others wait for.
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
