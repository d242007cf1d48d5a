"""Output during a run: plain lines when piped, a live panel below them on a terminal, one display in a notebook."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TextIO

import click

from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.plugins.spec import Owner
from retrain.rooms.session.streams import drop_stdout
from retrain.rooms.terminal.notebook import NotebookLines, is_notebook
from retrain.rooms.text.secrets import redacted
from retrain.rooms.text.terminal_text import GROUP_LEVEL, OUTCOME_LEVEL

LOGGER = "retrain"


class RedactedLines(logging.Formatter):
    """Lines without known secrets, where stdout does not leave them out itself: in somebody's program or notebook."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return str(redacted(super().format(record)))


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
        level = OUTCOME_LEVEL if is_quiet else GROUP_LEVEL
        with _handler(logger, PlainLines(sys.stdout), level):
            yield
        return
    from retrain.rooms.terminal.panel import LiveDisplay  # only a terminal needs rich

    display = LiveDisplay()
    plugins.add(display, Owner(distribution="retrain-core", source="retrain.rooms.terminal.panel"))
    with display, _handler(logger, display.handler(), logging.INFO):
        yield


def can_redraw() -> bool:
    """Whether stdout is a terminal that can move its cursor; TERM=dumb says that it cannot."""
    return sys.stdout.isatty() and os.environ.get("TERM", "").lower() not in ("dumb", "unknown")


@contextmanager
def _handler(logger: logging.Logger, handler: logging.Handler, level: int) -> Iterator[None]:
    before = logger.level, logger.propagate
    handler.setFormatter(RedactedLines("%(message)s"))
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
