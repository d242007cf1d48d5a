"""Prepares stdout and stderr, which may be closed, piped, in a legacy encoding, or without colour."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

COLOR_VARIABLES = ("NO_COLOR", "FORCE_COLOR")


def prepare_streams() -> None:
    """Make printing safe: characters missing from the encoding become `?`, output to a closed stream is dropped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - stays open until the process ends
        elif isinstance(stream, TextIOWrapper) and stream.encoding.lower().replace("-", "") != "utf8":
            stream.reconfigure(errors="replace")
    for name in COLOR_VARIABLES:
        if os.environ.get(name) == "":
            del os.environ[name]  # empty means absent by convention, but rich reads FORCE_COLOR= as "no"


def wants_color() -> bool | None:
    """False for `NO_COLOR` or a dumb terminal, True for `FORCE_COLOR`; None: only if the stream is a terminal.

    The rules are those of rich, which prints tables and panels; an empty variable counts as absent.
    """
    if os.environ.get("NO_COLOR"):
        return False
    if os.environ.get("FORCE_COLOR"):
        return True
    return False if os.environ.get("TERM") in ("dumb", "unknown") else None


def is_interactive() -> bool:
    """Whether stdin and stdout are both a terminal, so that the user can be prompted."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def drop_stdout() -> None:
    """Discard buffered output, so that flushing at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
