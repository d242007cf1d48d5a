"""Servers of other projects as processes: started, waited for until they answer, ended with all that they started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def launch(
    command: Sequence[str], log: Path, environ: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.Popen[bytes]:
    """Start a server without waiting for it, in a session of its own; its output is appended to `log`."""
    with log.open("ab") as stream:
        return subprocess.Popen(
            command, cwd=cwd, env=environ, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path, start_s: float) -> None:
    """Return when `url` answers; AssertionError with the end of the log when the server ends, or does not start."""
    deadline = time.monotonic() + start_s
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError):
            if httpx.get(url, timeout=5.0, trust_env=False).status_code == 200:
                return
        time.sleep(0.1)
    end(process)
    raise AssertionError(f"the server did not start: {log.read_text(encoding='utf-8', errors='replace')[-3000:]}")


def end(process: subprocess.Popen[bytes], *signals: int) -> None:
    """Send signals, SIGKILL last, to the server and its workers, each where the one before did not do."""
    for number in (*signals, signal.SIGKILL):
        with suppress(ProcessLookupError, subprocess.TimeoutExpired):
            os.killpg(process.pid, number)
            process.wait(20)


@contextmanager
def running(
    command: Sequence[str], url: str, log: Path, *, start_s: float, environ: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A server for the duration of the block."""
    process = launch(command, log, environ)
    try:
        wait_for(url, process, log, start_s)
        yield process
    finally:
        end(process, signal.SIGTERM)
