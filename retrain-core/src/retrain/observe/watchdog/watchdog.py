"""`[deadlines]`: heartbeats and limits of phases. A run that hangs reports where, saves its state and ends."""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from retrain.kernel.config.keys import Table, free
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.views import RunView, Watcher
from retrain.kernel.errors import Problem, RetrainError
from retrain.kernel.hooks import hookimpl
from retrain.records.reading import time_now
from retrain.records.record_names import HEARTBEAT, STACKS
from retrain.text.progress import progress_of

LOG = logging.getLogger("retrain")
# The longest delay in noticing an expired deadline.
POLL_S = 0.25
PHASES = ("sampling", "scoring", "training", "eval", "checkpoint")  # each has a deadline, `sampling_s` and so on


class DeadlinesTable(Table):
    """Time limits of the phases of a step; 0 = no limit."""

    sampling_s: float = free(0.0, "Seconds that sampling a step may take.", ge=0.0)
    scoring_s: float = free(0.0, "Seconds that scoring a step may take.", ge=0.0)
    training_s: float = free(0.0, "Seconds that an optimizer step may take.", ge=0.0)
    eval_s: float = free(0.0, "Seconds that an evaluation may take.", ge=0.0)
    checkpoint_s: float = free(0.0, "Seconds that writing a checkpoint may take.", ge=0.0)
    heartbeat_s: float = free(10.0, "Seconds between two writes of heartbeat.json; 0 = never.", ge=0.0)


class DeadlineError(RetrainError, RuntimeError):
    """A phase of the run took longer than `[deadlines]` allows."""

    label = "deadline"


def watch_run(context: PluginContext) -> Watchdog | None:
    """A watchdog, unless `[deadlines]` disables both heartbeat and deadlines."""
    deadlines = context.config.table("deadlines", DeadlinesTable)
    if not (deadlines.heartbeat_s or any(getattr(deadlines, f"{phase}_s") for phase in PHASES)):
        return None
    return Watchdog(deadlines, context.fail_run, partial(progress_of, context))


class Watchdog(Watcher):
    """A daemon thread that follows the phases of a run.

    Every `heartbeat_s` it replaces `heartbeat.json`. When a phase outlasts its deadline it writes the stacks of all
    threads to `stacks.txt` and stderr and requests a stop of the main thread: the run saves a checkpoint and ends with
    DeadlineError. If the main thread does not react within the grace period, the process exits with code 1 and the last
    checkpoint stays valid. The run's own thread never waits for this one: it only replaces one tuple.
    """

    def __init__(
        self,
        deadlines: DeadlinesTable,
        fail_run: Callable[[RetrainError], None],
        progress: Callable[[str, float], Mapping[str, Any]] = lambda phase, since: {},
    ) -> None:
        self._deadlines = deadlines
        self._fail_run = fail_run
        self._progress = progress
        self._folder = Path()
        self._current = (-1, "starting", time.monotonic())  # step, phase, since when
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="retrain-watchdog", daemon=True)
        self._has_expired = False
        self._is_reported = False

    @hookimpl
    def retrain_run_start(self, run: RunView) -> None:
        self._folder = run.folder
        self._current = (-1, "starting", time.monotonic())
        self._thread.start()

    def phase(self, step: int, phase: str) -> None:
        # A single tuple, so that the watching thread never sees the phase of one step with the time of another.
        self._current = (step, phase, time.monotonic())

    @hookimpl
    def retrain_run_end(self) -> None:
        self._current = (self._current[0], "ended", time.monotonic())
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        heartbeat_s, last = self._deadlines.heartbeat_s, -float("inf")
        poll_s = min(POLL_S, heartbeat_s or POLL_S)
        while True:
            has_ended = self._ended.wait(poll_s)
            if heartbeat_s and (has_ended or time.monotonic() - last >= heartbeat_s):
                last = time.monotonic()
                self._beat()
            if has_ended:
                return
            self._check()

    def _check(self) -> None:
        step, phase, since = self._current
        name = f"{phase}_s"
        limit_s = getattr(self._deadlines, name) if phase in PHASES else 0.0
        if not limit_s or self._has_expired or time.monotonic() - since <= limit_s:
            return
        # Stopping the run has its own time limit, so one report is enough.
        self._has_expired = True
        stacks = self._dump(f"step {step}, {phase}: longer than [deadlines] {name} = {limit_s:g}")
        problem = Problem(
            code="run.deadline",
            where=f"step {step}, {phase}",
            what=f"the phase took longer than [deadlines] {name} = {limit_s:g} seconds",
            why=f"{stacks} shows the stack of every thread at that moment",
            fix=f"repair the cause or raise [deadlines] {name}, and continue with `retrain --resume {self._folder}`",
        )
        self._fail_run(DeadlineError(problem))

    def _dump(self, title: str) -> Path:
        path = self._folder / STACKS
        try:
            with path.open("w", encoding="utf-8") as stream:
                stream.write(f"{title}\n\n")
                stream.flush()
                faulthandler.dump_traceback(file=stream, all_threads=True)
            text = path.read_text(encoding="utf-8", errors="replace")
            print(f"retrain: {text}", file=sys.stderr, flush=True)
        # A full disk or a closed stream must not keep the hanging run alive.
        except (OSError, ValueError) as error:
            LOG.warning("The stacks could not be written: %s", error)
        return path

    def _beat(self) -> None:
        step, phase, since = self._current
        beat: dict[str, Any] = {
            "time": time_now(),
            "pid": os.getpid(),
            "step": step,
            "phase": phase,
            "phase_elapsed_s": round(time.monotonic() - since, 3),
        }
        if progress := self._progress(phase, since):
            beat["progress"] = progress
        path = self._folder / HEARTBEAT
        temporary = path.with_name(f".{HEARTBEAT}.tmp")
        # Replaced atomically but not synced: after a power failure the last heartbeat is of no use.
        try:
            temporary.write_text(json.dumps(beat) + "\n", encoding="utf-8")
            temporary.replace(path)
        except OSError as error:
            if not self._is_reported:
                self._is_reported = True
                LOG.warning("%s cannot be written: %s", path, error.strerror or error)
