"""Stdout and stderr as they are found: closed, in an old encoding, piped, with or without colour."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

COLOR_VARIABLES = ("NO_COLOR", "FORCE_COLOR")


def prepare_streams() -> None:
    """See that no text of ours ends a command: what an encoding lacks is shown as `?`, a closed stream is mute."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - open as long as the process
        elif isinstance(stream, TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")
    for name in COLOR_VARIABLES:
        if os.environ.get(name) == "":
            del os.environ[name]  # absent, as the variables' own conventions say; rich takes FORCE_COLOR= for a no


def wants_color() -> bool | None:
    """False for `NO_COLOR` or a dumb terminal, True for `FORCE_COLOR`; None leaves it to whether it is a terminal.

    The same rules as rich's, which shows tables and panels; an empty variable counts as absent.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return False if os.environ.get("TERM") in ("dumb", "unknown") else None


def is_interactive() -> bool:
    """Whether a person can be asked: both stdin and stdout are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def drop_stdout() -> None:
    """What is still buffered goes nowhere, so that the interpreter does not stumble over it when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
