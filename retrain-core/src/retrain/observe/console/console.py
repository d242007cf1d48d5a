"""Output during a run: plain lines when piped, a live panel below them on a terminal, one display in a notebook."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TextIO

import click
from markupsafe import Markup

from retrain.kernel.registry import Owner, Plugins
from retrain.text.process import can_redraw, drop_stdout
from retrain.text.secrets import redacted
from retrain.text.terminal_text import OUTCOME_LEVEL, PROGRESS_LEVEL, harmless_lines

LOGGER = "retrain"


class HarmlessLines(logging.Formatter):
    """Lines without control characters, whatever a plugin or a server wrote, and without known secrets.

    stdout leaves secrets out itself, except in a notebook or a program that calls retrain.
    """

    def format(self, record: logging.LogRecord) -> str:
        """The line, or several."""
        return harmless_lines(str(redacted(super().format(record))))


class PlainLines(logging.StreamHandler[TextIO]):
    """Writes lines to stdout; the run continues when nothing reads them any more."""

    def handleError(self, record: logging.LogRecord) -> None:
        """Report once that the reader is gone or the disk is full, and write nothing from then on."""
        error = sys.exception()
        if not isinstance(error, OSError):
            super().handleError(record)
            return
        drop_stdout()
        gone = isinstance(error, BrokenPipeError)
        reason = "nothing reads the output any more" if gone else f"the output cannot be written: {error.strerror}"
        click.echo(f"retrain: {reason}; the run continues without it", err=True)


@contextmanager
def run_console(plugins: Plugins, *, is_quiet: bool = False) -> Iterator[None]:
    """Route the run's lines to stdout for the duration of the block, and show the live panel on a terminal.

    In a notebook the lines share one display. `is_quiet`: only warnings and the last lines.
    """
    logger = logging.getLogger(LOGGER)
    if is_notebook() and not is_quiet:
        with closing(NotebookLines()) as lines, _handler(logger, lines, logging.INFO):
            yield
        return
    if is_quiet or not can_redraw():
        level = OUTCOME_LEVEL if is_quiet else PROGRESS_LEVEL
        with _handler(logger, PlainLines(sys.stdout), level):
            yield
        return
    from retrain.observe.console.panel import LiveDisplay  # only a terminal needs rich

    display = LiveDisplay()
    plugins.add(display, Owner(distribution="retrain-core", source="retrain.observe.console.panel"))
    with display, _handler(logger, display.handler(), logging.INFO):
        yield


@contextmanager
def _handler(logger: logging.Logger, handler: logging.Handler, level: int) -> Iterator[None]:
    before = logger.level, logger.propagate
    handler.setFormatter(HarmlessLines("%(message)s"))
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]


LAST_LINES, LAST_WARNINGS = 15, 10
PAUSE_S = 0.2  # between two updates
SHOWN = Markup('<pre style="white-space: pre-wrap; line-height: 1.3; margin: 0">{}</pre>')  # escapes what it formats


def is_notebook() -> bool:
    """Whether this process is the kernel of a notebook; imports nothing."""
    ipython = sys.modules.get("IPython")
    return getattr(ipython and ipython.get_ipython(), "kernel", None) is not None


class NotebookLines(logging.Handler):
    """Shows the last lines below the last warnings; `close` shows what the pause between two updates held back."""

    def __init__(self) -> None:
        super().__init__()
        from IPython.display import DisplayHandle  # there is one in a notebook

        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._warnings: deque[str] = deque(maxlen=LAST_WARNINGS)
        self._display = DisplayHandle()
        self._shown_at = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Take a line."""
        lines = self._warnings if record.levelno == logging.WARNING else self._lines
        lines.extend(self.format(record).split("\n"))
        if time.monotonic() - self._shown_at > PAUSE_S:
            self._show()

    def close(self) -> None:
        """Show the last lines."""
        if self._lines or self._warnings:
            self._show()
        super().close()

    def _show(self) -> None:
        text = "\n".join([*self._warnings, *self._lines])
        bundle = {"text/plain": text, "text/html": SHOWN.format(text)}
        (self._display.update if self._shown_at else self._display.display)(bundle, raw=True)
        self._shown_at = time.monotonic()
