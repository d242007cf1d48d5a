"""What a person sees while a run goes on: plain lines when piped, with a live panel below them on a terminal."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from retrain.loop.lines import GROUP_LEVEL
from retrain.plugins.manager import Plugins
from retrain.plugins.spec import Owner

LOGGER = "retrain"


@contextmanager
def run_console(plugins: Plugins) -> Iterator[None]:
    """Route the run's lines to stdout for the duration of the block, and show the live panel on a terminal."""
    logger = logging.getLogger(LOGGER)
    if not sys.stdout.isatty():
        with _handler(logger, logging.StreamHandler(sys.stdout), GROUP_LEVEL):
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
