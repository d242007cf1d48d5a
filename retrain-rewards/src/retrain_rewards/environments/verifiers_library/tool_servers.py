"""Tool servers of v1 tasksets, forked from one process that has imported their modules.

The library starts `python -m MODULE` for each episode, in a folder where a module next to the configuration cannot be
imported. That takes seconds of processor time, so that the servers of one batch outlast its time limit, and the library
waits three minutes for one that has ended.
"""

from __future__ import annotations

import asyncio
import os
import runpy
import socket
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from verifiers.v1.errors import ToolsetError
from verifiers.v1.runtimes.subprocess import SubprocessRuntime

LOOK_S = 0.02  # between two looks at a server that starts
# Imports of servers when they start: up to 0.3 the library serves with FastMCP, later with MCPServer.
PRELOADED = ("uvicorn", "httpx", "tenacity", "mcp.server.fastmcp", "mcp.server.mcpserver", "mcp.server.streamable_http")
# A separate process forks them: a fork of this one would copy locks that its threads hold.
CONTEXT = get_context("forkserver")


def fork_tool_servers(modules: Iterable[str]) -> None:
    """Let the library's local runtime fork its servers, with these modules imported."""
    CONTEXT.set_forkserver_preload([*PRELOADED, *modules])
    SubprocessRuntime.run_background = _run_background


async def check_tool_servers(toolsets: Sequence[Any], timeout_s: float) -> None:
    """Start each server once and end it; ToolsetError or TimeoutError when one does not serve."""
    from verifiers.v1.mcp.launch import serve_shared

    for toolset in toolsets:
        async with asyncio.timeout(timeout_s), serve_shared([toolset]):
            pass


class _Server:
    """A forked server, with the attributes that the library uses of a process of asyncio."""

    def __init__(self, process: BaseProcess) -> None:
        self._process, self.pid = process, process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    async def wait(self) -> int:
        while self._process.exitcode is None:
            await asyncio.sleep(LOOK_S)
        return self._process.exitcode


async def _run_background(runtime: Any, argv: list[str], env: dict[str, str], log: str) -> None:
    """Start a server and wait until it listens; ToolsetError with its last output when it ends before that."""
    # Code of the environment gets none of the run's keys, as with the library's own start.
    environ = {name: value for name, value in os.environ.items() if "API_KEY" not in name.upper()}
    environ |= runtime.process_env(env)
    path = runtime.workdir / log
    process = CONTEXT.Process(target=_serve, args=(argv[-1], environ, str(runtime.workdir), str(path)), daemon=True)
    process.start()
    try:
        while not _listens(environ.get("MCP_PORT_FILE", ""), environ.get("MCP_PORT", "")):
            if process.exitcode is not None:
                said = path.read_text(errors="replace").strip()[-500:] if path.exists() else ""
                raise ToolsetError(f"the tool server {argv[-1]} ended before it served: {said or 'it wrote nothing'}")
            await asyncio.sleep(LOOK_S)
    except BaseException:
        process.kill()
        raise
    runtime._background.append(_Server(process))


def _listens(port_file: str, port: str) -> bool:
    with suppress(OSError, ValueError):
        number = int(port or Path(port_file).read_text())
        socket.create_connection(("127.0.0.1", number), timeout=1.0).close()
        return True
    return False


def _serve(module: str, environ: Mapping[str, str], folder: str, log: str) -> None:
    """Run the module as `python -m` does, in a new session as the library expects."""
    os.setsid()
    os.chdir(folder)
    with open(log, "wb") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv = [module]
    sys.modules.pop(module, None)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
