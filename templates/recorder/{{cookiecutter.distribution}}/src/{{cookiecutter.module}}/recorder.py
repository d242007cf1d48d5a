"""Recorder `{{ cookiecutter.name }}`: every number of a run as a line of `metrics.csv`."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.api import PluginContext

FILE = "metrics.csv"
HEADER = ("step", "metric", "value")
SIZE = "bytes_written"


class LongCsv:
    """Appends to a file and completes it at each step; a resume truncates it to its size at the checkpoint."""

    def __init__(self) -> None:
        self._file: Path | None = None
        self._resumed_at: int | None = None

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue after the lines that existed at the checkpoint."""
        self._resumed_at = int(state[SIZE])

    def start(self, manifest: Mapping[str, Any], folder: Path) -> None:
        """Create the run's file, or truncate the file of a resumed run to its checkpoint."""
        self._file = folder / FILE
        if self._resumed_at is not None and self._file.exists():
            os.truncate(self._file, min(self._resumed_at, self._file.stat().st_size))
            return
        with self._file.open("w", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerow(HEADER)

    def step(self, metrics: Mapping[str, Any]) -> None:
        """Write one line per number; text, lists and empty fields are left out."""
        if self._file is None:
            return
        numbers = {name: value for name, value in metrics.items() if isinstance(value, bool | int | float)}
        step = numbers.pop("step", "")
        with self._file.open("a", encoding="utf-8", newline="") as stream:
            csv.writer(stream).writerows((step, name, float(value)) for name, value in numbers.items())

    def checkpoint(self, folder: Path, name: str) -> None:
        """Does nothing with adapters."""

    def state(self) -> Mapping[str, Any]:
        """The size of the file."""
        return {SIZE: self._file.stat().st_size if self._file is not None and self._file.exists() else 0}

    def finish(self, error: BaseException | None = None) -> None:
        """Holds no open file."""


def create(context: PluginContext) -> LongCsv:
    """The recorder; `context.config` has the whole configuration, in case yours needs it."""
    return LongCsv()
