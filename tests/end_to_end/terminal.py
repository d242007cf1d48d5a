"""A person at a terminal: a real pseudo-terminal, with keys pressed when the program has asked."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Sequence
from pathlib import Path

PATIENCE_S = 60.0  # without a word from the program; then it is killed and what it said is returned
CTRL_C = "\x03"
# Python looks for signals between its own instructions: one that comes after `input` has begun, and before it reads, is
# seen when a line was read. Nobody is as quick as that but a program that watches the prompt; on a busy machine it may
# be too quick all the same, and presses the key again, as a person does.
HUMAN_S = 0.5
AGAIN_S = 3.0


def converse(
    argv: Sequence[str],
    exchange: Sequence[tuple[str, str]],
    *,
    cwd: Path,
    environ: dict[str, str] | None = None,
    columns: int = 100,
) -> tuple[int, str]:
    """Run a program on a terminal; for each `(awaited, keys)`, in order, press `keys` once `awaited` was printed.

    Returns exit code and all that was printed. What is awaited must be printed after the keys before were pressed.
    """
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    process = subprocess.Popen(
        argv,
        cwd=cwd,
        stdin=follower,
        stdout=follower,
        stderr=follower,
        env={**inherited, "TERM": "xterm-256color", **(environ or {})},
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # Ctrl-C is then a signal, as it is for a person
    )
    os.close(follower)
    printed, seen, pending, keys, silent_s = bytearray(), 0, list(exchange), "", 0.0
    while silent_s < PATIENCE_S:
        if not select.select([leader], [], [], AGAIN_S)[0]:
            silent_s += AGAIN_S
            if CTRL_C in keys:
                os.write(leader, CTRL_C.encode())
            continue
        silent_s = 0.0
        try:
            chunk = os.read(leader, 65536)
        except OSError:  # Linux reports the end of a terminal as an error
            break
        if not chunk:
            break
        printed += chunk
        while pending and pending[0][0].encode() in printed[seen:]:
            awaited, keys = pending.pop(0)
            seen = printed.index(awaited.encode(), seen) + len(awaited.encode())
            if CTRL_C in keys:
                time.sleep(HUMAN_S)
            os.write(leader, keys.encode())
    else:
        process.kill()
    os.close(leader)
    return process.wait(timeout=PATIENCE_S), printed.decode("utf-8", errors="replace").replace("\r", "")
