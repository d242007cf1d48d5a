"""Where nobody sees the live panel: a line about the phase after every half minute without one."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from retrain.text.phase_progress import phase_text, progress_of
from retrain.text.terminal_text import PROGRESS_LEVEL

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext

LOG = logging.getLogger("retrain")
SILENCE_S = 30.0


class ProgressLines:
    """A daemon thread that logs how far the phase has come when the run has been silent for `silence_s`."""

    def __init__(self, context: PluginContext, silence_s: float = SILENCE_S) -> None:
        self._context = context
        self._silence_s = silence_s
        self._current = (-1, "", time.monotonic())  # step, phase, since when
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="retrain-progress", daemon=True)
        self.last_line = time.monotonic()  # when the run was last heard of

    def start(self) -> None:
        """Start, if anybody reads lines at this level: neither the live panel nor `--quiet` does."""
        self.last_line = time.monotonic()
        if LOG.isEnabledFor(PROGRESS_LEVEL):
            self._thread.start()

    def enter(self, step: int, phase: str) -> None:
        """Another phase begins."""
        self._current = step, phase, time.monotonic()

    def end(self) -> None:
        """No line from here on."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(max(0.0, self.last_line + self._silence_s - time.monotonic())):
            if time.monotonic() - self.last_line >= self._silence_s:
                self.last_line = time.monotonic()
                LOG.log(PROGRESS_LEVEL, "%s", self._line())

    def _line(self) -> str:
        step, phase, since = self._current
        return "  " + phase_text(phase, step, time.monotonic() - since, progress_of(self._context, phase, since))
