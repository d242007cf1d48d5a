"""Starts, monitors, retries and stops the runs of a campaign, and keeps the manifest up to date."""

from __future__ import annotations

import os
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.campaign import planned
from retrain.campaign.folder import keep_earlier
from retrain.campaign.launching import FindsJobs, Job, Launcher, RunningJob
from retrain.campaign.load import Campaign, gpus_per_run
from retrain.campaign.looks import PlannedLooks
from retrain.campaign.manifest import CampaignRecord, Manifest
from retrain.campaign.report_lines import Lines
from retrain.kernel.errors import EXIT_RESUMABLE, EXIT_USAGE, RetrainError
from retrain.kernel.registry import Plugins
from retrain.records.files import owner_of, write_text
from retrain.records.reading import time_now
from retrain.records.run import is_run
from retrain.run.interrupts import handled_signals
from retrain.text.amounts import counted
from retrain.text.process import python_command
from retrain.text.terminal_text import OUTCOME_LEVEL

POLL_S = 0.2
# A campaign of thousands of runs that fail at once must still look at those that are active, and at a stop.
STARTS_AT_ONCE = 100
# Beyond the `grace_s` of the runs, so that a run ends itself before the campaign kills it.
EXTRA_GRACE_S = 15.0
PROGRAM = (*python_command(), "-m", "retrain")


@dataclass(slots=True, kw_only=True)
class _Active:
    """An active run. `is_own`: its exit code will be known. `steps_before` were done when it was started."""

    run: planned.PlannedRun
    job: RunningJob
    since: float
    is_own: bool
    continues: bool = False
    steps_before: int = 0


class Schedule:
    """Executes the remaining runs, at most `workers` at a time."""

    def __init__(
        self,
        campaign: Campaign,
        runs: Sequence[planned.PlannedRun],
        *,
        workers: int,
        throttle_dir: Path | None,
        manifest: Manifest,
        launcher: Launcher,
        lines: Lines,
        follow_ups: FollowUps,
        stops: Stops,
        record: CampaignRecord,
        looks: PlannedLooks | None = None,
    ) -> None:
        self._campaign, self._workers, self._throttle_dir = campaign, workers, throttle_dir
        self._manifest, self._launcher, self._lines = manifest, launcher, lines
        self._follow_ups, self._stops, self._record = follow_ups, stops, record
        self._looks = looks
        self.cannot_look: RetrainError | None = None
        self._queue: deque[planned.PlannedRun] = deque()
        self._active: dict[str, _Active] = {}
        self.attempts: Counter[str] = Counter()  # of this session
        self._anew: set[str] = set()  # runs whose resume was refused
        self._next_launch = 0.0
        self._num_done = 0
        self.failures: dict[str, str] = {}
        for run in runs:
            self._sort_in(run)

    def run(self) -> None:
        """Return when all runs have ended; after a stop request, when each has saved its state or was killed."""
        while self._is_open and not self._stops.reason:
            self._launch()
            self._collect()
            self._take_look()
            for followed in self._follow_ups.finished():
                self._manifest.change_run(followed.run.name, followed_up=True)
                self._manifest.change(**followed.fields)
                if followed.error:
                    self._manifest.change_run(followed.run.name, follow_up_error=followed.error)
                    self._lines.say(f"  after {followed.run.name}: {followed.error}")
            self._manifest.save()
            self._lines.show({name: active.run for name, active in self._active.items()}, self._num_done)
            if self._active or self._follow_ups.num_open or self._queue:
                self._stops.wait(POLL_S)
        if self._stops.reason:
            self._stop_all()
        self._manifest.save()

    @property
    def _is_open(self) -> bool:
        is_waiting = not self.cannot_look and (self._queue or (self._looks and self._looks.due))
        return bool(is_waiting or self._active or self._follow_ups.num_open)

    def _take_look(self) -> None:
        """Take the planned look once every run before it has ended; runs that it saves are not started."""
        looks = self._looks
        if not looks or not looks.due or self._active or self.cannot_look or any(map(looks.may_start, self._queue)):
            return
        # The look reads from the manifest which runs failed for good.
        self._manifest.save()
        try:
            look = looks.take()
        except RetrainError as error:  # nothing to compare: the same command takes the look when runs are there
            self.cannot_look = error
            return
        self._manifest.change(looks=[*looks.taken])
        for run in [run for run in self._queue if not looks.is_needed(run)]:
            self._queue.remove(run)
            self._manifest.change_run(run.name, status=planned.State.NOT_NEEDED)
        # Saved before anything starts, so that a campaign that is killed now does not decide again.
        self._manifest.save()
        self._lines.say(f"  {look.text}", OUTCOME_LEVEL)

    def _sort_in(self, run: planned.PlannedRun) -> None:
        """Classify a run by its folder; the manifest may be out of date."""
        if planned.is_done(run):
            self._manifest.change_run(run.name, status=planned.State.DONE)
            self._done(run)
        elif isinstance(self._launcher, FindsJobs) and (found := self._launcher.find(run.name, run.folder)):
            self._manifest.change_run(run.name, status=planned.State.RUNNING)
            self._follow(run, found, "started by an earlier session, waiting for it", continues=is_run(run.folder))
        elif owner_of(run.folder):
            self._manifest.change_run(run.name, status=planned.State.RUNNING)
            self._follow(run, planned.Adopted(run.folder), "still alive, waiting for it", is_own=False)
        elif self._looks and not self._looks.is_needed(run) and not is_run(run.folder):
            self._manifest.change_run(run.name, status=planned.State.NOT_NEEDED)
        else:
            self._manifest.change_run(run.name, status=planned.State.QUEUED, pid=None)
            self._queue.append(run)

    def _follow(
        self, run: planned.PlannedRun, job: RunningJob, note: str, *, is_own: bool = True, continues: bool = False
    ) -> None:
        steps = planned.progress(run.folder).steps_done if continues else 0
        self._active[run.name] = _Active(
            run=run, job=job, since=time.monotonic(), is_own=is_own, continues=continues, steps_before=steps
        )
        self._manifest.change_run(run.name, pid=job.pid)
        self._lines.started(run, job.pid, note)

    def _launch(self) -> None:
        """Start as many runs as there is room for; the manifest counts the attempts before the first process starts."""
        chosen: list[planned.PlannedRun] = []
        # A sequential campaign has room for one process: the follow-up first.
        is_waiting = self._workers == 1 and self._follow_ups.num_open
        room = 0 if is_waiting else min(self._workers - len(self._active), STARTS_AT_ONCE)
        while self._queue and len(chosen) < room and time.monotonic() >= self._next_launch:
            run = next((run for run in self._queue if not self._looks or self._looks.may_start(run)), None)
            if run is None:
                break
            self._next_launch = time.monotonic() + self._campaign.table.stagger_seconds
            self._queue.remove(run)
            chosen.append(run)
        before = {run.name: dict(self._manifest.run(run.name)) for run in chosen}
        for run in chosen:
            attempts = before[run.name]["attempts"] + 1
            fields = {"pid": None, "started": time_now(), "ended": None, "returncode": None}
            self._manifest.change_run(run.name, status=planned.State.RUNNING, attempts=attempts, **fields)
        self._manifest.save()
        for run in chosen:
            if self._stops.reason:
                self._manifest.change_run(run.name, **before[run.name])
                self._queue.append(run)
            else:
                self._start(run)

    def _start(self, run: planned.PlannedRun) -> None:
        continues = run.name not in self._anew and planned.can_continue(run)
        self.attempts[run.name] += 1
        self._record.attempt(run.name, self._manifest.run(run.name)["attempts"], continues=continues)
        try:
            if not continues and is_run(run.folder):
                keep_earlier(run.folder)
            job = self._launcher.start(self._job(run, continues=continues))
        except (RetrainError, OSError) as error:
            self._lines.started(run, None, "")
            self._failed(run, EXIT_USAGE, str(error), may_retry=False)
            return
        number = self.attempts[run.name]
        notes = [f"attempt {number}"] * (number > 1) + ["continued"] * continues
        self._follow(run, job, ", ".join(notes), continues=continues)

    def _job(self, run: planned.PlannedRun, *, continues: bool) -> Job:
        campaign = self._campaign
        tables = planned.run_config(run, campaign, self._throttle_dir)
        run.config_file.parent.mkdir(parents=True, exist_ok=True)
        run.folder.mkdir(parents=True, exist_ok=True)
        write_text(run.config_file, planned.config_text(tables))
        resume = ("--resume", str(run.folder)) if continues else ()
        if continues and campaign.config.resume.anyway:
            resume = (*resume, "--resume-anyway", "true")
        return Job(
            name=run.name,
            argv=(*PROGRAM, str(run.config_file), *resume),
            environ=planned.run_environ(tables, campaign.keys, os.environ),
            cwd=Path.cwd(),
            folder=run.folder,
            num_cpus=max(1, (os.cpu_count() or 1) // self._workers),
            num_gpus=gpus_per_run(run.condition.config, campaign.table),
        )

    def _collect(self) -> None:
        for name, active in list(self._active.items()):
            code = active.job.poll()
            if code is None:
                continue
            run = active.run
            # The job is gone, but a process holds the folder: an orphan of it, or another user's run.
            if owner_of(run.folder):
                active.job, active.is_own = planned.Adopted(run.folder), False
                self._manifest.change_run(name, pid=active.job.pid)
                continue
            del self._active[name]
            self._ended(active, code)

    def _ended(self, active: _Active, code: int) -> None:
        run, seconds = active.run, time.monotonic() - active.since
        self._manifest.change_run(run.name, ended=time_now(), returncode=code, pid=None)
        if planned.is_done(run):
            self._manifest.change_run(run.name, status=planned.State.DONE, returncode=0)
            self._lines.ended(run, seconds)
            self._done(run)
        elif self._stops.reason:
            self._manifest.change_run(run.name, status=planned.State.STOPPED)
        # Another session's process ended for an unknown cause; its records say where to continue.
        elif not active.is_own:
            self._manifest.change_run(run.name, status=planned.State.QUEUED)
            self._queue.appendleft(run)
        # Taken away by a time limit or a preemption: no failure as long as it makes progress.
        elif code == EXIT_RESUMABLE and planned.progress(run.folder).steps_done > active.steps_before:
            self.attempts[run.name] -= 1
            self._lines.ended(
                run, seconds, planned.reason_of_failure(run, code), note="it got further, and is continued"
            )
            self._manifest.change_run(run.name, status=planned.State.QUEUED)
            self._queue.appendleft(run)
        else:
            if code == EXIT_USAGE and active.continues:
                self._anew.add(run.name)
            # A configuration error would only repeat itself, a refused resume not: the run begins again then.
            may_retry = code != EXIT_USAGE or active.continues
            self._failed(run, code, planned.reason_of_failure(run, code), may_retry=may_retry, seconds=seconds)

    def _failed(
        self, run: planned.PlannedRun, code: int, reason: str, *, may_retry: bool, seconds: float = 0.0
    ) -> None:
        left = self._campaign.table.retries + 1 - self.attempts[run.name] if may_retry else 0
        note = f"retrying, {counted(left, 'attempt')} left" if left > 0 else ""
        self._lines.ended(run, seconds, " ".join(reason.split()), note=note)
        if left > 0:
            self._manifest.change_run(run.name, status=planned.State.QUEUED, error=reason)
            self._queue.appendleft(run)
            return
        self._manifest.change_run(
            run.name, status=planned.State.FAILED, ended=time_now(), returncode=code, error=reason
        )
        self.failures[run.name] = reason

    def _done(self, run: planned.PlannedRun) -> None:
        self._num_done += 1
        first = self._manifest.content.get("first_done") or run.name
        self._manifest.change(first_done=first)
        if not self._manifest.run(run.name).get("followed_up"):
            self._follow_ups.submit(run, is_first=first == run.name)

    def _stop_all(self) -> None:
        """Stop every run, wait for them, and kill those that do not end."""
        self._lines.say(f"Stopping ({self._stops.reason}): {len(self._active)} runs save their state")
        for active in self._active.values():
            active.job.stop()
        grace_s = max((a.run.condition.config.training.grace_s for a in self._active.values()), default=0.0)
        end = time.monotonic() + grace_s + EXTRA_GRACE_S
        while self._active and not self._stops.is_urgent and time.monotonic() < end:
            self._collect()
            self._manifest.save()
            self._stops.wait(POLL_S)
        for active in self._active.values():
            active.job.kill()
            self._manifest.change_run(active.run.name, status=planned.State.STOPPED, ended=time_now(), pid=None)


SIGNALS = tuple(getattr(signal, n) for n in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1") if hasattr(signal, n))


class Stops:
    """The stop requested so far: a first signal lets the runs save their state and exit, a second one kills them."""

    def __init__(self) -> None:
        self.reason = ""
        self.is_urgent = False
        self._event = threading.Event()

    def request(self, reason: str) -> None:
        """Request a stop; a second request makes it urgent."""
        self.is_urgent = bool(self.reason)
        self.reason = self.reason or reason
        self._event.set()

    def wait(self, seconds: float) -> None:
        """Sleep until the time is over or a stop is requested."""
        self._event.wait(seconds)
        self._event.clear()

    def installed(self) -> AbstractContextManager[object]:
        """Handle signals within the block; only the main thread can."""
        return handled_signals(SIGNALS, lambda number, _: self.request(signal.Signals(number).name))


HOOK = "retrain_campaign_run_done"


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowUpResult:
    """The plugins' answer for one run: fields for the manifest, or the error that was raised."""

    run: planned.PlannedRun
    fields: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""


class FollowUps:
    """Calls the hook for one finished run after another, in a daemon thread, while other runs continue."""

    def __init__(self, campaign: Campaign, plugins: Plugins, folder: Path, tables: frozenset[str]) -> None:
        self._campaign, self._plugins, self._folder, self._tables = campaign, plugins, folder, tables
        self._wanted: queue.SimpleQueue[tuple[planned.PlannedRun, bool]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[FollowUpResult] = queue.SimpleQueue()
        self.num_open = 0
        self._thread: threading.Thread | None = None

    def submit(self, run: planned.PlannedRun, *, is_first: bool) -> None:
        self.num_open += 1
        self._wanted.put((run, is_first))
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="campaign-follow-up", daemon=True)
            self._thread.start()

    def finished(self) -> Iterator[FollowUpResult]:
        while not self._results.empty():
            self.num_open -= 1
            yield self._results.get()

    def _work(self) -> None:
        while True:
            run, is_first = self._wanted.get()
            told = {"config": self._campaign.config, "tables": self._tables, "campaign": self._folder}
            try:
                answers = self._plugins.notify(HOOK, run=run.folder, is_first=is_first, **told)
                fields = {name: value for answer in answers if answer for name, value in answer.items()}
                result = FollowUpResult(run=run, fields=fields)
            # Everything is caught: otherwise the campaign would wait for a dead thread.
            except BaseException as error:
                text = str(error) if isinstance(error, RetrainError) else f"{type(error).__name__}: {error}"
                result = FollowUpResult(run=run, error=text)
            self._results.put(result)
