"""The run's side of a child process: start it, call it within a time limit, kill it with all it has started."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from retrain.kernel import errors
from retrain.kernel.errors import PluginError, Problem, RetrainError
from retrain.tasks.child import wire

# Preparing may import a large library from a cold disk.
START_TIMEOUT_S = 120.0
# Least and most seconds for taking a call: an idle worker does so at once, but the machine may be very busy.
HANDOVER_S = (1.0, 60.0)
LAST_WORDS_S = 5.0
KILL_S = 2.0
# Largest target that is sent at the launch: less than a socket's buffer holds, so that `launch` never waits.
AHEAD_BYTES = 2**15
BOOT = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from retrain.tasks.child.main import main; main()"


class ChildFailure(Exception):  # noqa: N818 - not always a fault of our code
    """A call, or the start, ended without a value; the text says why, fit for a record."""


class ChildTimeout(ChildFailure):
    """The method, or the start, took too long; the process was killed."""


class ChildDied(ChildFailure):
    """The process ended by itself or was killed from outside; unless `has_started` the call is not to blame."""

    def __init__(self, text: str, *, has_started: bool = False, output: str = "") -> None:
        super().__init__(text)
        self.has_started = has_started
        self.output = output


class ChildError(ChildFailure):
    """The method raised: class name and text of the exception, the user's line, and the traceback as text."""

    def __init__(self, name: str, text: str, traceback: str = "", place: str = "") -> None:
        super().__init__((f"{name}: {text}" if text else name) + place)
        self.name = name
        self.traceback = traceback


class Child:
    """A process that holds `target` and answers calls of its methods, one at a time.

    `target` is pickled once, from this process to its child; nothing that a child sends is unpickled, since all else
    travels as JSON (`wire.py`). The child has our import paths, folder and environment, and a separate session; it may
    use `memory_gb` (2**30 bytes) of address space, 0 = unlimited. It dies, with all processes it has started, when it
    is killed and when this process dies in any way. `name` is used in messages: "the scoring process died with signal
    9". A child that is gone can be started again.
    """

    def __init__(self, target: object, *, memory_gb: float = 0.0, name: str = "child") -> None:
        self.name = name
        self.seconds = 0.0  # that the last call, or preparing, took in the child
        self._target = target
        self._memory_bytes = int(memory_gb * 2**30)
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._life_line: socket.socket | None = None
        self._is_launched = False  # the process runs, and `start` has not waited for it yet
        self._is_sent = False  # it has its target

    @property
    def is_running(self) -> bool:
        return self._process is not None and not self._is_launched

    @property
    def pid(self) -> int:
        """Process group of the child; 0 when it is not running."""
        process = self._process
        return process.pid if process else 0

    def launch(self) -> None:
        """Start the process and return at once; a small target is sent too, and prepared while the run continues."""
        with suppress(OSError, ChildFailure, PluginError):
            self._boot()
            content = self._pickled()
            if len(content) <= AHEAD_BYTES:
                self._send(content, START_TIMEOUT_S)
                self._is_sent = True

    def start(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the process unless it was launched, send the target, and let it prepare. Raises as `call` does."""
        if not self._is_launched:
            self._boot()
        self._is_launched = False
        try:
            deadline = time.monotonic() + timeout_s
            if not self._is_sent:
                self._send(self._pickled(), timeout_s)
            self._value(self._receive(deadline - time.monotonic(), f"did not start within {timeout_s:g} s"))
        except BaseException:
            self.kill()
            raise

    def _boot(self) -> None:
        self.kill()
        connection, theirs = socket.socketpair()
        life_line, far_end = socket.socketpair()
        try:
            arguments = [json.dumps([path for path in sys.path if isinstance(path, str)])]
            arguments += [str(os.getpid()), str(theirs.fileno()), str(far_end.fileno()), str(self._memory_bytes)]
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", BOOT, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(), far_end.fileno()),
                start_new_session=True,
                # A fixed hash seed, so that sets of text have the same order in every run.
                env={"PYTHONHASHSEED": "0", **os.environ},
            )
        except BaseException:
            connection.close()
            life_line.close()
            raise
        finally:
            theirs.close()
            far_end.close()
        with self._lock:
            self._process, self._connection, self._life_line = process, connection, life_line
        self._is_launched, self._is_sent = True, False

    def call(self, method: str, *arguments: object, timeout_s: float) -> Any:
        """Return the value of `target.method(*arguments)`; the clock starts when the method does.

        After ChildTimeout (past `timeout_s`) and ChildDied the process is gone. A process that does not take the call
        within about `timeout_s`, because it is stopped, counts as dead before the method had begun. ChildError when the
        method raised; an error meant for users (`RetrainError`) is raised as itself. TypeError for arguments that
        cannot be sent.
        """
        content = wire.dumps({"method": method, "arguments": list(arguments)})
        if self._process is None:
            raise ChildDied(f"the {self.name} process is not running")
        try:
            self._hand_over(content, min(max(timeout_s, HANDOVER_S[0]), HANDOVER_S[1]))
            frame = self._receive(timeout_s, f"timed out after {timeout_s:g} s", has_started=True)
        # An interrupt too: a late answer would be taken for the next call's.
        except BaseException:
            self.kill()
            raise
        return self._value(frame)

    def kill(self) -> None:
        """End the process and everything below it at once; idempotent, and safe from any thread."""
        with self._lock:
            process, connection, life_line = self._process, self._connection, self._life_line
            self._process = self._connection = self._life_line = None
            self._is_launched = False
        if process is None or connection is None or life_line is None:
            return
        with suppress(OSError):
            # Closing would not wake a call waiting in another thread.
            connection.shutdown(socket.SHUT_RDWR)
        # The guard then kills all processes below it, even those that left the group.
        life_line.close()
        try:
            process.wait(KILL_S)
        except BaseException as error:  # the guard does not react, or a signal handler raised
            with suppress(OSError):
                # It is not reaped yet, so its id cannot belong to another process.
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise

    close = kill

    def _pickled(self) -> bytes:
        try:
            return pickle.dumps(self._target)
        # `pickle` has no common class of errors, and `__reduce__` of user code may raise anything.
        except Exception as error:
            kind = type(self._target).__name__
            what = f"{self.name}: a {kind} cannot be sent to another process: {type(error).__name__}: {error}"
            fix = "hold plain data in it, and open files, locks and models in `prepare`"
            raise PluginError(Problem(code="plugin.not-picklable", what=what, fix=fix)) from error

    def _send(self, content: bytes, timeout_s: float) -> None:
        connection = self._connection
        try:
            if connection is not None:
                wire.send(connection, content, timeout_s=timeout_s)
        except TimeoutError:
            raise ChildDied(f"the {self.name} process accepted no call for {timeout_s:g} s") from None
        except OSError:
            raise self._death(has_started=False) from None

    def _hand_over(self, content: bytes, timeout_s: float) -> None:
        try:
            self._send(content, timeout_s)
            self._receive(timeout_s, f"the {self.name} process did not take a call within {timeout_s:g} s")
        except ChildTimeout as error:
            raise ChildDied(str(error)) from None

    def _receive(self, timeout_s: float, late: str, *, has_started: bool = False) -> Any:
        connection = self._connection
        try:
            content = wire.receive(connection, timeout_s=timeout_s) if connection is not None else None
            frame = None if content is None else wire.loads(content)
        except TimeoutError:
            raise ChildTimeout(late) from None
        except wire.WireError as error:
            text = f"the {self.name} process sent an invalid answer: {error}"
            raise ChildDied(text, has_started=has_started) from error
        except OSError:
            frame = None
        if frame is None:
            raise self._death(has_started=has_started)
        return frame

    def _value(self, frame: Any) -> Any:
        if "error" not in frame:
            self.seconds = frame["seconds"]
            return frame.get("value")
        self.seconds = frame.get("seconds", 0.0)
        kind = getattr(errors, frame.get("kind", ""), None)
        if isinstance(kind, type) and issubclass(kind, RetrainError):
            raise kind(*frame["problems"])
        raise ChildError(frame["error"], frame["text"], frame["traceback"], frame["place"])

    def _death(self, *, has_started: bool) -> ChildDied:
        process, life_line = self._process, self._life_line
        if process is None or life_line is None:
            return ChildDied(f"the {self.name} process was killed", has_started=has_started)
        report: dict[str, Any] = {}
        life_line.settimeout(LAST_WORDS_S)
        with suppress(OSError, ValueError), life_line.makefile("rb") as stream:
            report = json.load(stream)
        status = report.get("status")
        if status is None:
            with suppress(subprocess.TimeoutExpired):
                status = process.wait(KILL_S)
        if status is None:
            text = "closed its connection"
        else:
            text = f"died with signal {-status}" if status < 0 else f"exited with code {status}"
        return ChildDied(f"the {self.name} process {text}", has_started=has_started, output=report.get("output", ""))


def in_copy(work: Callable[[], Any], *, timeout_s: float) -> Any | None:
    """Return the JSON value of `work`; None if its process died, took longer than `timeout_s`, or cannot be forked."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return None
    forking = multiprocessing.get_context("fork")
    reading, writing = forking.Pipe(duplex=False)
    copy = forking.Process(target=_answer, args=(work, writing, timeout_s))
    with warnings.catch_warnings():
        # Python warns because NumPy has started threads; the copy uses none of them.
        warnings.simplefilter("ignore", DeprecationWarning)
        copy.start()
    assert copy.pid
    writing.close()
    try:
        return json.loads(reading.recv_bytes()) if reading.poll(timeout_s) else None
    except (EOFError, OSError, ValueError):  # it died before or in the middle of its answer
        return None
    finally:
        reading.close()
        # The group as well, since the copy may have started processes.
        for end in (os.killpg, os.kill):
            with suppress(ProcessLookupError, PermissionError):
                end(copy.pid, signal.SIGKILL)
        copy.join()


def _answer(work: Callable[[], Any], writing: Connection, timeout_s: float) -> None:
    try:
        os.setsid()
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # It ends by itself even if this process is gone.
        signal.alarm(int(timeout_s) + 1)
        nothing = open(os.devnull, "r+", encoding="utf-8")  # noqa: SIM115 - open until the process ends
        for descriptor in (0, 1, 2):
            os.dup2(nothing.fileno(), descriptor)
        sys.stdin = sys.stdout = sys.stderr = nothing
        sys.breakpointhook = lambda *_, **__: None
        logging.disable()
        writing.send_bytes(json.dumps(work()).encode())
    finally:
        # `sys.exit` would run `atexit` and flush buffers that belong to the original.
        os._exit(0)
