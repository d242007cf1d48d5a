"""Processes that begin with torch and transformers already imported, which is half of what a short run takes.

A server, a Python process that has imported them and nothing of ours, forks one process per command; the script runs
in it from its first line, with its own arguments, folder, environment, output and exit code. Two servers take turns,
so that processes that follow each other differ in how Python hashes strings, as they do where each starts anew.
"""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from itertools import cycle
from typing import Any

IS_POSSIBLE = sys.platform == "linux"  # elsewhere a fork of what has loaded torch is not safe
OURS = "RETRAIN_"  # what no library reads while it is imported
SERVER = """
import gc, json, os, signal, socket, sys
import torch
import pydantic, scipy.special  # of what a run imports besides, the largest
from transformers import AutoTokenizer, PreTrainedTokenizerFast
assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"

def serve(requests):
    # Returns in a new process, with what it is to run.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    gc.freeze()
    os.write(1, b"ready\\n")
    while True:
        message, received, *_ = socket.recv_fds(requests, 1 << 18, 4)
        if not message:
            sys.exit()
        if os.fork() == 0:
            return begin(json.loads(message), *received)
        for each in received:
            os.close(each)

def begin(request, *received):
    # Watches the new process, in which alone it returns, and reports its number and, in the end, its status.
    *streams, report = received
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        for each in streams:
            os.close(each)
        os.write(report, b"%d\\n" % child)
        os.write(report, b"%d\\n" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        os._exit(0)
    for number, each in enumerate(streams):
        os.dup2(each, number)
    for each in received:
        os.close(each)
    os.chdir(request["cwd"])
    own = {"LC_CTYPE": os.environ["LC_CTYPE"]} if "LC_CTYPE" in os.environ else {}  # Python's own, see PEP 538
    os.environ.clear()
    os.environ.update(own | request["env"])
    return request["program"]

requests = socket.socket(fileno=int(sys.argv[1]))
program = serve(requests)
requests.close()
if program[1] == "-c":
    sys.argv = ["-c", *program[3:]]
    del serve, begin, requests
    exec(compile(program[2], "<string>", "exec"))
else:
    import runpy
    sys.argv = program[1:]
    sys.path[0] = os.path.dirname(program[1])
    runpy.run_path(program[1], run_name="__main__")
"""


class Preloaded(subprocess.Popen[str]):
    """`subprocess.Popen` for `[sys.executable, SCRIPT or "-c", ...]`, started by one of the servers."""

    _report = -1

    def _execute_child(self, args: list[str], *options: Any) -> None:
        _, _, _, _, cwd, env, _, _, _, *pipes = options[:15]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        streams = [given if given >= 0 else own for own, given in enumerate((p2cread, c2pwrite, errwrite))]
        self._report, written = os.pipe()
        message = json.dumps({"program": args, "cwd": str(cwd), "env": dict(env)}).encode()
        try:
            socket.send_fds(next(_servers())[0], [message], [*streams, written])
        finally:
            os.close(written)
            self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]
        self.pid = int(self._told(None) or 0)
        assert self.pid, "the server started nothing"
        self._child_created = True

    def _told(self, timeout: float | None) -> str:
        """The next line of the report; nothing if none comes in time."""
        if not select.select([self._report], [], [], timeout)[0]:
            return ""
        line = b""
        while not line.endswith(b"\n"):
            byte = os.read(self._report, 1)
            assert byte, "whoever watched the process is gone"
            line += byte
        return line.decode().strip()

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None and (status := self._told(timeout)):
            self.returncode = int(status)
            os.close(self._report)
        return self.returncode

    def _internal_poll(self, *_: Any, **__: Any) -> int | None:
        return self._ended(0.0)

    def _wait(self, timeout: float | None) -> int:
        if (code := self._ended(timeout)) is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return code


def popen(program: list[str], *, cwd: object, env: dict[str, str]) -> subprocess.Popen[str]:
    """Start `[SCRIPT, ...]` or `[sys.executable, "-c", ...]`, its output piped; preloaded where that is the same."""
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    if not IS_POSSIBLE or _read_by_libraries(env) != _read_by_libraries(dict(os.environ)):
        return subprocess.Popen(program, cwd=str(cwd), env=env, **options)
    start = program if program[0] == sys.executable else [sys.executable, *program]
    return Preloaded(start, cwd=str(cwd), env=env, **options)


def _read_by_libraries(environ: dict[str, str]) -> dict[str, str]:
    changing = ("PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "_")
    return {name: value for name, value in environ.items() if not name.startswith(OURS) and name not in changing}


@cache
def _servers() -> Iterator[tuple[socket.socket, subprocess.Popen[bytes]]]:
    return cycle([_started(), _started()])


def _started() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:  # the server ends when our end is closed
        command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
        # pipes, as those of the processes to be: what Python found out about them stays true
        pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        server = subprocess.Popen(command, pass_fds=[theirs.fileno()], **pipes)
    assert server.stdout is not None
    first = server.stdout.readline()
    assert first == b"ready\n", (first + server.stdout.read()).decode()
    return ours, server
