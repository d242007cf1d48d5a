"""What a person sees while a run goes on: plain lines when piped, with a live panel below them on a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from retrain.loop.lines import GROUP_LEVEL, OUTCOME_LEVEL
from retrain.plugins.manager import Plugins
from retrain.plugins.spec import Owner

LOGGER = "retrain"


@contextmanager
def run_console(plugins: Plugins, *, is_quiet: bool = False) -> Iterator[None]:
    """Route the run's lines to stdout for the duration of the block, and show the live panel on a terminal.

    Quiet: warnings and the last lines alone.
    """
    logger = logging.getLogger(LOGGER)
    if is_quiet or not sys.stdout.isatty():
        level = OUTCOME_LEVEL if is_quiet else GROUP_LEVEL
        with _handler(logger, logging.StreamHandler(sys.stdout), level):
            yield
        return
    from retrain.cli.display import LiveDisplay

    display = LiveDisplay()
    plugins.add(display, Owner(distribution="retrain-core", source="retrain.cli.display"))
    with display, _handler(logger, display.handler(), logging.INFO):
        yield


@contextmanager
def _handler(logger: logging.Logger, handler: logging.Handler, level: int) -> Iterator[None]:
    before = logger.level, logger.propagate
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.setLevel(level)
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        logger.propagate = before[1]
