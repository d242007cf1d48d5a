"""Admits one process at a time to a run folder; the lock ends with the process."""

from __future__ import annotations

import fcntl
import os
import socket
import time
from pathlib import Path
from typing import TextIO

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import ConfigError, Problem

NAME = ".lock"
TRIES, PAUSE_S = 20, 0.01  # `owner_of` takes the lock for an instant when no process holds it


class RunLock:
    """An advisory lock on a run folder, held until `release` or the end of the process.

    ConfigError when another process holds it, or its file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._stream: TextIO = (path / NAME).open("a+", encoding="utf-8")
        except OSError as error:
            what, fix = f"cannot be opened: {error.strerror or error}", "make it writable, or choose another --log-dir"
            raise ConfigError(Problem(where=str(path / NAME), what=what, fix=fix)) from error
        if not self._is_taken():
            self._stream.close()
            what = f"{path} belongs to a run that is still going on (process {owner_of(path)})"
            raise ConfigError(Problem(what=what, fix="wait for it, or choose another --log-dir"))
        self._stream.truncate(0)
        self._stream.write(f"{os.getpid()} {socket.gethostname()}\n")
        self._stream.flush()

    def _is_taken(self) -> bool:
        for attempt in range(TRIES):
            time.sleep(PAUSE_S if attempt else 0.0)
            try:
                fcntl.flock(self._stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
        return False

    def release(self) -> None:
        self._stream.close()


def owner_of(path: Path) -> int:
    """Return the id of the process whose run uses this folder; 0 without one, -1 if it is not one of this machine.

    On a shared folder the lock of another machine is visible, but its process id means nothing here.
    """
    file = path / NAME
    try:
        with open_regular(file) as stream:
            try:
                fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                pid, _, host = stream.read().decode("utf-8", "replace").strip().partition(" ")
                return int(pid) if pid.isdigit() and host in ("", socket.gethostname()) else -1
    except OSError:
        return 0
    return 0
