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
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from retrain_rewards.code import inside

START_S = 10.0
MESSAGE_CHARS = 300
CHUNK_BYTES = 2**20
ENVIRONMENT = {"PYTHONHASHSEED": "0", "PYTHONUTF8": "1", "LANG": "C.UTF-8"}
KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": lambda flat: dict(zip(flat[::2], flat[1::2], strict=True)),
    "bytes": lambda parts: parts[0].encode("latin-1"),
    "complex": lambda parts: complex(*parts),
    "float": lambda parts: float(parts[0]),
}


class ProcessFault(Exception):  # noqa: N818 - not always an error of ours
    """The process could not be started; the text says why."""


class ProcessEnded(Exception):  # noqa: N818 - the program's doing
    """The process ended, took too long or spoke nonsense instead of answering; the text says which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a process may use: address space, processor seconds in all, and bytes of a file or of what it prints."""

    memory_bytes: int = 2**30
    cpu_s: int = 10
    output_bytes: int = 2**23

    @property
    def frame_bytes(self) -> int:
        """The longest frame: every byte of what was printed as an escape."""
        return 6 * self.output_bytes


class Process:
    """An interpreter behind `command` that plays one part of `inside`; a context that ends it with all it started."""

    def __init__(self, command: Sequence[str], python: str, limits: Limits, *, calls: bytes = b"") -> None:
        self.limits = limits
        self._inner = 0  # the process that the sandbox's own process has started
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
            self._receive(time.monotonic() + START_S)
            self._inner = json.loads(os.read(self._info, CHUNK_BYTES))["child-pid"] if command else 0
        except ProcessEnded as error:
            self._kill()
            why = self._last_words() or str(error)
            self.close()
            raise ProcessFault(why) from None
        except BaseException:
            self.close()
            raise

    def _spawn(
        self, command: Sequence[str], python: str, channel: socket.socket, calls: bytes
    ) -> subprocess.Popen[bytes]:
        folder = "/" if command else self._exits.enter_context(tempfile.TemporaryDirectory(prefix="program-"))
        # -s -S -P: no packages and no folder of ours; not -I, which would not let us fix the order of sets
        bare = [python, "-s", "-S", "-P", "-B", "-c", _source()]
        sizes = [str(size) for size in (self.limits.memory_bytes, self.limits.cpu_s, self.limits.output_bytes)]
        with ExitStack() as spawning:
            told: list[str] = []
            descriptors: list[int] = []
            if command:
                self._info, writing = os.pipe()
                self._exits.callback(os.close, self._info)
                spawning.callback(os.close, writing)
                descriptors, told = [writing], ["--info-fd", str(writing)]
            if calls:
                descriptors.append(_pipe_with(calls, spawning))
                told += ["--seccomp", str(descriptors[-1])]
            return subprocess.Popen(
                [*command, *told, *bare, *sizes],
                stdin=channel.fileno(),
                stdout=channel.fileno(),
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
                cwd=folder,
                env=ENVIRONMENT,
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

    def ask(self, message: Any, deadline: float) -> Any:
        """The answer to a message, as JSON gives it; ProcessEnded without one."""
        self.send(message, deadline)
        return self._receive(deadline)

    def close(self) -> None:
        """End the process and everything that it has started; safe to call twice."""
        self._kill()
        if self._process.stderr:
            self._process.stderr.close()
        with suppress(OSError):  # what a program without a sandbox did to its own folder is its own affair
            self._exits.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kill(self) -> None:
        if self._process.returncode is not None:  # waited for already: the number may be another process's by now
            return
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        if self._inner:  # ours now where orphans are adopted, as in a scoring process, which would look for it
            with suppress(ChildProcessError):
                os.waitpid(self._inner, 0)

    def _last_words(self) -> str:
        assert self._process.stderr is not None
        os.set_blocking(self._process.stderr.fileno(), False)
        said = self._process.stderr.read() or b""
        return " ".join(said.decode("utf-8", "replace").split())[-MESSAGE_CHARS:]

    def _receive(self, deadline: float) -> Any:
        size = int.from_bytes(self._read(inside.HEADER_BYTES, deadline), "big")
        if size > self.limits.frame_bytes:
            raise ProcessEnded("answered with too much")
        try:
            return json.loads(self._read(size, deadline))
        except (ValueError, RecursionError):
            raise ProcessEnded("answered with something that cannot be read") from None

    def _read(self, size: int, deadline: float) -> bytes:
        content = bytearray()
        while len(content) < size:
            self._channel.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                part = self._channel.recv(min(size - len(content), CHUNK_BYTES))
            except TimeoutError:
                raise ProcessEnded("ran out of time") from None
            except OSError:
                part = b""
            if not part:
                raise ProcessEnded("ended early")
            content += part
        return bytes(content)


def decoded(value: Any) -> Any:
    """The plain value that `inside` has encoded; ValueError for anything that is none."""
    if not isinstance(value, list):
        return value
    try:
        return KINDS[value[0]]([decoded(each) for each in value[1:]])
    except (LookupError, TypeError, AttributeError, RecursionError, ValueError) as error:
        raise ValueError(f"no plain value: {type(error).__name__}") from None


@lru_cache(maxsize=1)
def _source() -> str:
    return Path(inside.__file__).read_text(encoding="utf-8")


def _pipe_with(content: bytes, exits: ExitStack) -> int:
    """A descriptor from which a new process reads `content`, less than a pipe holds."""
    reading, writing = os.pipe()
    exits.callback(os.close, reading)
    os.write(writing, content)
    os.close(writing)
    return reading
