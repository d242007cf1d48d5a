"""Prepares stdout and stderr, which may be closed, piped, in a legacy encoding, or without colour."""

from __future__ import annotations

import os
import sys
from io import TextIOWrapper

from retrain.text.secrets import redacted
from retrain.text.terminal_text import DUMB, is_redrawable

COLOR_VARIABLES = ("NO_COLOR", "FORCE_COLOR")


class RedactingStream(TextIOWrapper):
    """Writes to the file of another text stream, without known secrets: of messages, logs and tracebacks alike."""

    def __init__(self, stream: TextIOWrapper) -> None:
        super().__init__(
            stream.buffer,
            encoding=stream.encoding,
            errors=stream.errors,
            line_buffering=stream.line_buffering,
            write_through=stream.write_through,
        )
        self._first = stream  # collected, it would close the file

    def write(self, text: str) -> int:
        """Write the text; the count is that of the text given, as callers expect."""
        super().write(redacted(text))
        return len(text)


def prepare_streams() -> None:
    """Make printing safe: known secrets are hidden, characters missing from the encoding become `?`, output to a
    closed stream is dropped."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115 - stays open until the process ends
        elif isinstance(stream, TextIOWrapper):
            if stream.encoding.lower().replace("-", "") != "utf8":
                stream.reconfigure(errors="replace")
            stream.flush()
            setattr(sys, name, RedactingStream(stream))
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
    return False if os.environ.get("TERM", "").lower() in DUMB else None


def can_redraw() -> bool:
    """Whether stdout is a terminal that can move its cursor; TERM=dumb says that it cannot."""
    return is_redrawable(sys.stdout)


def is_interactive() -> bool:
    """Whether stdin and stdout are both a terminal, so that the user can be prompted."""
    return sys.stdin is not None and sys.stdin.isatty() and sys.stdout.isatty()


def drop_stdout() -> None:
    """Discard buffered output, so that flushing at exit does not fail."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
