"""Isolates a run from its watchers: an exception in one is logged once, by name, and training continues."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable

LOG = logging.getLogger("retrain")
MAX_REASON_CHARS = 300


def reason_of(error: Exception) -> str:
    # The text comes from a plugin or a library: it may hold a secret, or characters that steer a terminal.
    return printable(" ".join(hide_text(f"{type(error).__name__}: {error}").split())[:MAX_REASON_CHARS])


class FaultGuard:
    """Calls methods of recorders or monitors; `consequence` completes the warning about one that raised."""

    def __init__(self, kind: str, consequence: str) -> None:
        self._kind = kind
        self._consequence = consequence
        self._reported: set[str] = set()

    def call(self, name: str, method: str, function: Callable[..., Any], *arguments: Any) -> tuple[bool, Any]:
        """Return True and the result of `function`, or False and None if it raised."""
        try:
            return True, function(*arguments)
        except Exception as error:
            self.report(name, method, error)
            return False, None

    def state(self, name: str, function: Callable[[], Mapping[str, Any] | None]) -> dict[str, Any]:
        """State of one of them; empty if it is not JSON, because it must not make a checkpoint fail."""

        def plain() -> Any:
            # A value that JSON cannot hold fails here, not later while the checkpoint is written.
            return json.loads(json.dumps(dict(function() or {}), allow_nan=False))

        return self.call(name, "state", plain)[1] or {}

    def report(self, name: str, method: str, error: Exception) -> None:
        """Log the first fault of each name."""
        if name in self._reported:
            return
        self._reported.add(name)
        LOG.warning("%s %r failed in %s(): %s. %s", self._kind, name, method, reason_of(error), self._consequence)
        LOG.debug("%s %r failed", self._kind, name, exc_info=error)
