"""Our side of a process in the sandbox: start it, exchange frames within a time limit, kill it."""

from __future__ import annotations

import json
import marshal
import os
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from retrain_rewards.sandbox import inside

START_S = 10.0
MESSAGE_CHARS = 300
SLACK_BYTES = 4096
CHUNK_BYTES = 2**20
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LANG": "C.UTF-8"}
# Between two looks at the number of threads.
SLICE_S = 0.02
PACKAGE = "retrain_rewards.sandbox"
MODULES = ("start", "inside", "values", "functions", "link", "checks")
BOOT = f"""
import marshal, os, sys
def read(size):
    content = b""
    while len(content) < size:
        part = os.read(0, size - len(content))
        if not part: os._exit(0)
        content += part
    return content
modules = marshal.loads(read(int.from_bytes(read(8), "big")))
spec = sys.modules["_frozen_importlib"].ModuleSpec
class Finder:
    def find_spec(self, name, path=None, target=None):
        return spec(name, self, is_package=not modules[name]) if name in modules else None
    def create_module(self, spec): return None
    def exec_module(self, module):
        if modules[module.__name__]: exec(marshal.loads(modules[module.__name__]), module.__dict__)
sys.meta_path.insert(0, Finder())
from {PACKAGE} import start
start.main(sys.argv[1:])
"""


class ProcessFault(Exception):  # noqa: N818 - not always a fault of our code
    """The process could not be started; the text says why."""


class ProcessEnded(Exception):  # noqa: N818 - the program's doing
    """The process ended, took too long or sent an invalid answer; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a process: address space, processor seconds in all, and bytes of a file or of its output."""

    memory_bytes: int = 2**30
    cpu_s: int = 10
    output_bytes: int = 2**23


class Process:
    """An interpreter behind `command` that plays one part of `inside`; `link` connects it with another one."""

    def __init__(
        self,
        command: Sequence[str],
        python: str,
        limits: Limits,
        *,
        calls: bytes = b"",
        link: socket.socket | None = None,
        packages: str = "",
    ) -> None:
        self.limits = limits
        self._link = link
        self._packages = packages
        self._inner = 0  # the process that the sandbox's own process has started
        self._program = 0  # and its child, in which the program runs
        self._exits = ExitStack()
        self._channel, theirs = socket.socketpair()
        self._exits.callback(self._channel.close)
        try:
            with theirs:
                self._process = self._spawn(command, python, theirs, calls)
        except BaseException:
            self._exits.close()
            raise
        try:
            # The interpreter sees no file of retrain: its code comes through the channel.
            self.send(_modules(), time.monotonic() + START_S)
            self._receive(time.monotonic() + START_S, SLACK_BYTES)
            self._inner = json.loads(os.read(self._info, CHUNK_BYTES))["child-pid"] if command else 0
        except ProcessEnded as error:
            self._kill()
            assert self._process.stderr is not None
            os.set_blocking(self._process.stderr.fileno(), False)
            said = " ".join((self._process.stderr.read() or b"").decode("utf-8", "replace").split())
            self.close()
            raise ProcessFault(said[-MESSAGE_CHARS:] or str(error)) from None
        except BaseException:
            self.close()
            raise

    def _spawn(
        self, command: Sequence[str], python: str, channel: socket.socket, calls: bytes
    ) -> subprocess.Popen[bytes]:
        folder = "/" if command else self._exits.enter_context(tempfile.TemporaryDirectory(prefix="program-"))
        # -s -S -P: no packages and none of our folders; not -I, since it would ignore the hash seed that orders sets
        bare = [python, "-s", "-S", "-P", "-B", "-c", BOOT]
        linked = self._link.fileno() if self._link else -1
        numbers = map(str, (self.limits.memory_bytes, self.limits.cpu_s, self.limits.output_bytes, linked))
        with ExitStack() as spawning:
            told: list[str] = []
            descriptors: list[int] = []
            if command:
                self._info, writing = os.pipe()
                self._exits.callback(os.close, self._info)
                spawning.callback(os.close, writing)
                descriptors, told = [writing], ["--info-fd", str(writing)]
            descriptors += [linked] if self._link else []
            if calls:  # less than a pipe holds
                reading, writing = os.pipe()
                spawning.callback(os.close, reading)
                os.write(writing, calls)
                os.close(writing)
                descriptors.append(reading)
                told += ["--seccomp", str(reading)]
            return subprocess.Popen(
                [*command, *told, *bare, *numbers],
                stdin=channel.fileno(),
                stdout=channel.fileno(),
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                cwd=folder,
                env=ENVIRONMENT | ({"PYTHONPATH": self._packages} if self._packages else {}),
                start_new_session=True,
            )

    def send(self, message: Any, deadline: float) -> None:
        """Send plain values; ProcessEnded when they are not taken in time."""
        content = marshal.dumps(message)
        self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            self._channel.sendall(len(content).to_bytes(inside.HEADER_BYTES, "big") + content)
        except TimeoutError:
            raise ProcessEnded("ran out of time") from None
        except OSError:
            raise ProcessEnded("ended early") from None

    def ask(self, message: Any, deadline: float, limit_bytes: int = 0, beside: Process | None = None) -> bytes:
        """Return the answer to a message; until it comes, threads of it and of the process `beside` it are counted."""
        self.send(message, deadline)
        # the longest frame holds everything printed, and the text of a fault
        return self._receive(deadline, limit_bytes or self.limits.output_bytes + SLACK_BYTES, beside)

    def close(self) -> None:
        self._kill()
        if self._process.stderr:
            self._process.stderr.close()
        # A program without a sandbox may have changed its own folder.
        with suppress(OSError):
            self._exits.close()

    def _kill(self) -> None:
        # Waited for already: the number may be another process's by now.
        if self._process.returncode is not None:
            return
        with suppress(OSError):
            # The whole group, as a program without a sandbox may have forked.
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        # Our child where orphans are adopted: a scoring process would look for it.
        if self._inner:
            with suppress(ChildProcessError):
                os.waitpid(self._inner, 0)

    def _receive(self, deadline: float, limit_bytes: int, beside: Process | None = None) -> bytes:
        watched = [self, beside] if beside else [self]
        size = int.from_bytes(self._read(inside.HEADER_BYTES, deadline, watched), "big")
        if size > limit_bytes:
            raise ProcessEnded("answered with too much")
        return self._read(size, deadline, watched)

    def _read(self, size: int, deadline: float, watched: Sequence[Process]) -> bytes:
        content = bytearray()
        while len(content) < size:
            left_s = deadline - time.monotonic()
            self._channel.settimeout(max(min(left_s, SLICE_S), 0.001))
            try:
                part = self._channel.recv(min(size - len(content), CHUNK_BYTES))
            except TimeoutError:
                if left_s <= SLICE_S:
                    raise ProcessEnded("ran out of time") from None
                if max(process.tasks() for process in watched) > inside.TASKS:
                    raise ProcessEnded("started too many threads") from None
                continue
            except OSError:
                part = b""
            if not part:
                raise ProcessEnded("ended early")
            content += part
        return bytes(content)

    def tasks(self) -> int:
        pid = self._inner or self._process.pid
        try:
            if self._inner and not self._program:  # the sandbox's own process has started one more, the program's
                self._program = int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            return len(os.listdir(f"/proc/{self._program or pid}/task"))
        except (OSError, ValueError, IndexError):
            return 0


@lru_cache(maxsize=1)
def _modules() -> dict[str, bytes]:
    folder = Path(inside.__file__).parent
    code = {
        f"{PACKAGE}.{name}": marshal.dumps(compile((folder / f"{name}.py").read_text("utf-8"), f"{name}.py", "exec"))
        for name in MODULES
    }
    return {"retrain_rewards": b"", PACKAGE: b""} | code
