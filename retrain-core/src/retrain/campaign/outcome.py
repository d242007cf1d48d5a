"""The state of a campaign's run, read from its folder: the manifest may be out of date."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from retrain.campaign.planned import PlannedRun
from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE, ConfigError, ResumeError
from retrain.records.checkpoints import FINAL, newest_valid
from retrain.records.files import owner_of
from retrain.records.run import Run
from retrain.text.secrets import hide_text
from retrain.text.terminal_text import printable

ERROR_HEAD = re.compile(r"retrain: \w+ error")
TAIL_BYTES = 65536
REASON_CHARS = 300


class State(StrEnum):
    """State of a run or a campaign in the manifest."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    STOPPED = "stopped"
    NOT_NEEDED = "not needed"  # of a run that the planned looks saved


@dataclass(frozen=True, slots=True, kw_only=True)
class RunProgress:
    """Steps done, and the correct rate of the last one, from the last whole line of `metrics.jsonl`."""

    steps_done: int = 0
    correct_rate: float | None = None


def is_done(run: PlannedRun) -> bool:
    """Whether the run has reached its last step and saved its adapter."""
    return _manifest(run.folder).get("status") == "done" and (Run(run.folder).adapters / FINAL).is_dir()


def can_continue(run: PlannedRun) -> bool:
    """Whether to `--resume` the run: it was interrupted, or failed with a valid checkpoint.

    A run that failed before its first checkpoint starts again; its records are moved aside.
    """
    manifest = _manifest(run.folder)
    if manifest.get("status") != "failed":
        return bool(manifest)
    checkpoint, _ = newest_valid(Run(run.folder).adapters)
    return checkpoint is not None


def reason_of_failure(run: PlannedRun, code: int) -> str:
    """Exit code or signal, and the last error of the run, in one line."""
    known = {int(each): each.name for each in signal.Signals}
    head = f"killed by {known.get(-code, f'signal {-code}')}" if code < 0 else f"exit {code}"
    error = str(_manifest(run.folder).get("error") or "") or _last_error(run.folder / "stderr.log")
    shown = " ".join(printable(hide_text(error)).split())
    return f"{head}: {shown[:REASON_CHARS]}" if shown else head


def progress(folder: Path) -> RunProgress:
    """Progress of a run; only the end of `metrics.jsonl` is read."""
    with suppress(ConfigError, ValueError, KeyError, TypeError):
        record = Run(folder).last_step(skip_damaged=True)
        return RunProgress(steps_done=max(0, int(record["step"]) + 1), correct_rate=record.get("correct_rate"))
    return RunProgress()


def recorded_code(folder: Path) -> int:
    """The exit code of a run that has ended, from its records: SIGKILL for one that could not record its end."""
    status = str(_manifest(folder).get("status"))
    codes = {"done": EXIT_DONE, "failed": EXIT_FAILED, "stopped": EXIT_RESUMABLE}
    return codes.get(status, -int(signal.SIGKILL))


class Adopted:
    """A run that an earlier session started and that is still alive: it is awaited, not started twice."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.pid: int | None = max(owner_of(folder), 0) or None

    def poll(self) -> int | None:
        """Exit code according to its records; None while a process holds its folder."""
        return None if owner_of(self._folder) else recorded_code(self._folder)

    def kill(self) -> None:
        """Kill the run."""
        self.stop(signal.SIGKILL)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask the run to save its state and exit."""
        if (pid := owner_of(self._folder)) > 0:
            with suppress(OSError):
                os.kill(pid, number)


def _manifest(folder: Path) -> Mapping[str, Any]:
    try:
        return Run(folder).started_manifest()
    except ResumeError:
        return {}


def _last_error(file: Path) -> str:
    """The first problem of the last error that retrain printed, else the last line (of a traceback, for instance)."""
    tail = b""
    with suppress(OSError), open_regular(file) as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - TAIL_BYTES))
        tail = stream.read()
    lines = [line.strip() for line in tail.decode("utf-8", "replace").splitlines()]
    texts = [line for line in lines if line and not line.startswith("fix:")]
    heads = [number for number, line in enumerate(texts[:-1]) if ERROR_HEAD.fullmatch(line)]
    return texts[heads[-1] + 1].removeprefix("1. ") if heads else (texts[-1] if texts else "")
