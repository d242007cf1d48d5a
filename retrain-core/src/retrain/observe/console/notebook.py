"""Lines of a run in a notebook: one display per cell that is updated in place, so that a long run does not flood it."""

from __future__ import annotations

import logging
import sys
import time
from collections import deque

from markupsafe import Markup

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
