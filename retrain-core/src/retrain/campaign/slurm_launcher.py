"""Launcher `slurm`: runs as tasks of job arrays, in partitions of a cluster.

Runs that start together are one array, one `squeue` covers all of them, and a thread runs the commands: a controller
that is slow or away blocks nothing, and is waited for. Jobs outlive the campaign's process; `find` gets them back.
"""

from __future__ import annotations

import json
import logging
import math
import os
import secrets
import shlex
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from retrain.campaign import slurm_commands
from retrain.campaign.launching import Job
from retrain.campaign.planned import recorded_code
from retrain.campaign.slurm_commands import PREFIX, PROGRAMS, Listing, SlurmError
from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import EXIT_RESUMABLE, EXIT_USAGE, BackendError, ConfigError, Problem
from retrain.records.files import write_json

LOG = logging.getLogger("retrain")
STOP, KILL = ("--batch", "--signal=TERM"), ("--full", "--signal=KILL")  # options of `scancel`
# An array is submitted after this long without another start.
GATHER_S = 0.1
# Between two queries while runs are stopping, because the user waits for that.
STOPPING_S = 1.0
# Two commands of 60 s each may still be waiting for a busy controller.
CLOSE_S = 150.0
# A job that waits for one of these starts by itself; any other reason is reported.
USUAL_REASONS = frozenset(("", "None", "Resources", "Priority", "JobArrayTaskLimit", "BeginTime", "Cleaning"))


class Options(BaseModel):
    """`[campaign.launcher_options]`: options of `sbatch`, for each run."""

    model_config = ConfigDict(extra="forbid", strict=True)
    partition: str = ""  # empty = the cluster's default; the same with the next four
    account: str = ""
    qos: str = ""
    time: str = ""  # limit of a run, as "2:00:00"; a run that reaches it saves its state, and is continued
    mem: str = ""  # memory of a run, as "32G"
    num_cpus: int = Field(default=1, ge=1)  # cores per run, and OMP_NUM_THREADS
    num_gpus: int | None = Field(default=None, ge=0)  # per run; None = as [backend] devices says, if there are any
    gres: str = ""  # in place of gpu:{num_gpus}, as "gpu:a100:2"
    sbatch: list[str] = Field(default_factory=list)  # further options of sbatch, as "--constraint=nvlink"
    setup: list[str] = Field(default_factory=list)  # shell lines on the node before a run, as "module load cuda"
    array_size: int = Field(default=1000, ge=1)  # runs in an array, at most; a cluster's MaxArraySize limits it
    poll_s: float = Field(default=10.0, gt=0.0)  # between two questions for the state of all runs

    def arguments(self, num_gpus: int, cwd: Path, grace_s: float) -> list[str]:
        named = {"partition": self.partition, "account": self.account, "qos": self.qos}
        named |= {"time": self.time, "mem": self.mem, "gres": self.gres or (f"gpu:{num_gpus}" if num_gpus else "")}
        return [
            *(f"--{name}={value}" for name, value in named.items() if value),
            *("--nodes=1", "--ntasks=1", f"--cpus-per-task={self.num_cpus}", f"--chdir={cwd}"),
            # The campaign starts a lost run again itself, from its checkpoint.
            "--no-requeue",
            f"--signal=B:TERM@{math.ceil(grace_s)}",
            # Every run writes separate logs.
            "--output=/dev/null",
            *self.sbatch,
        ]


def build(context: PluginContext) -> SlurmLauncher:
    """Check that jobs can be submitted here. ConfigError without Slurm's programs, and when its controller is away."""
    options = context.params if isinstance(context.params, Options) else Options()
    if missing := [program for program in PROGRAMS if shutil.which(program) is None]:
        what = f"{', '.join(missing)} not found: this machine hands in no Slurm jobs"
        fix = "start the campaign on a login node of the cluster, or choose another launcher"
        where = context.config.place("campaign.launcher")
        raise ConfigError(Problem(code="campaign.no-slurm", where=where, what=what, fix=fix))
    where = context.config.place("campaign.launcher_options")
    try:
        found = slurm_commands.generic_resources(options.partition)
    except SlurmError as error:
        raise ConfigError(silent_slurm(error, where)) from error
    if not found:
        missing_part = f"partition {options.partition!r}" if options.partition else "nodes"
        what, fix = f"the cluster has no {missing_part}", "choose one of those that `sinfo` lists"
        raise ConfigError(Problem(code="campaign.no-partition", where=where, what=what, fix=fix))
    has_gpus = any(kind.startswith("gpu") for kind in found)
    return SlurmLauncher(options, has_gpus=has_gpus, grace_s=context.config.training.grace_s)


def silent_slurm(error: SlurmError, where: str = "") -> Problem:
    what, fix = f"Slurm does not answer: {error}", "try `sinfo`; start the campaign again when the cluster is up"
    return Problem(code="campaign.slurm-silent", where=where, what=what, fix=fix)


class SlurmLauncher:
    """Submits runs, queries their states and passes stops on, in rounds of one thread."""

    def __init__(self, options: Options, *, has_gpus: bool, grace_s: float) -> None:
        self._options, self._has_gpus, self._grace_s = options, has_gpus, grace_s
        self._lock, self._wake = threading.Lock(), threading.Event()
        self._waiting: list[SlurmJob] = []  # to be handed in
        self._handed_in: list[SlurmJob] = []
        self._told: set[str] = set()  # reasons why jobs wait
        self._thread: threading.Thread | None = None
        self._listing: Listing | None = None
        self._is_closing = self._is_away = False

    def start(self, job: Job) -> SlurmJob:
        """Submit the run with the next round, together with all that start at the same time."""
        job = replace(job, folder=job.cwd / job.folder)
        configured = self._options.num_gpus
        num_gpus = job.num_gpus * self._has_gpus if configured is None else configured
        try:
            # The file that starts the run; only its owner can read it.
            variables = {"OMP_NUM_THREADS": str(self._options.num_cpus), **job.environ}
            exports = [f"export {name}={shlex.quote(value)}" for name, value in variables.items()]
            # The run becomes the job's own process and gets Slurm's signals.
            command = f"exec {shlex.join(job.argv)}"
            file = job.folder / START
            file.unlink(missing_ok=True)
            descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w", encoding="utf-8") as stream:
                stream.write("\n".join(['rm -f -- "$folder/slurm.sh"', *exports, command, ""]))
        except OSError as error:
            what = f"the start script of {job.name} cannot be written: {error}"
            fix = "check that the campaign's folder can be written, and that the disk is not full"
            raise BackendError(Problem(code="campaign.cannot-start", what=what, fix=fix)) from error
        started = SlurmJob(self, job.folder, job.cwd, num_gpus)
        with self._lock:
            self._waiting.append(started)
        self.wake()
        return started

    def find(self, name: str, folder: Path) -> SlurmJob | None:
        folder = Path.cwd() / folder
        if (record := TaskRecord.read(folder)) is None:
            return None
        if self._listing is None:
            try:
                self._listing = slurm_commands.listing()
            except SlurmError as error:
                raise BackendError(silent_slurm(error)) from error
        state = self._listing.of(record.name, record.task)
        if state is None or state.has_ended:
            return None
        found = SlurmJob(self, folder, record=replace(record, job_id=state.job_id))
        with self._lock:
            self._handed_in.append(found)
        self.wake()
        return found

    def wake(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="campaign-slurm", daemon=True)
            self._thread.start()
        self._wake.set()

    def withdraw(self, job: SlurmJob) -> bool:
        with self._lock:
            is_waiting = job in self._waiting
            self._waiting = [each for each in self._waiting if each is not job]
        return is_waiting

    def close(self) -> None:
        """Pass the last requests on; jobs that were not stopped keep running."""
        self._is_closing = True
        if self._thread:
            self._wake.set()
            self._thread.join(CLOSE_S)
        if left := [each.shown for each in self._handed_in if each.request]:
            LOG.warning("Slurm did not take the request to stop %d jobs; scancel %s", len(left), " ".join(left[:20]))

    def _work(self) -> None:
        while True:
            is_last = self._is_closing
            try:
                self._round()
            except BaseException:  # the campaign would wait for ever
                LOG.exception("the thread that speaks to Slurm failed")
                for job in (*self._waiting, *self._handed_in):
                    job.code = EXIT_USAGE
                return
            if is_last:
                return
            is_stopping = any(each.is_stopped for each in self._handed_in) and not self._is_away
            self._wake.wait(STOPPING_S if is_stopping else self._options.poll_s)
            self._wake.clear()

    def _round(self) -> None:
        known = 0
        # The schedule starts runs one by one: wait until no more arrive, so that they become one array.
        while known < len(self._waiting) < self._options.array_size:
            known = len(self._waiting)
            time.sleep(GATHER_S)
        with self._lock:
            waiting, self._waiting = self._waiting, []
        groups: dict[tuple[Path, int], list[SlurmJob]] = defaultdict(list)
        for job in waiting:
            groups[job.cwd, job.num_gpus].append(job)
        for alike in groups.values():
            for start in range(0, len(alike), self._options.array_size):
                self._hand_in(alike[start : start + self._options.array_size])
        with self._lock:
            active = list(self._handed_in)
        if not active or (listing := self._ask()) is None:
            return
        for job in active:
            job.update(listing)
        states = [listing.of(job.record.name, job.record.task) for job in active]
        waiting_for = Counter(each.reason for each in states if each and each.state == "PENDING")
        for reason in waiting_for.keys() - USUAL_REASONS - self._told:
            self._told.add(reason)
            LOG.warning("%d runs wait in the queue of Slurm: %s", waiting_for[reason], reason)
        self._pass_on([job for job in active if job.request and job.code is None], listing)
        with self._lock:
            self._handed_in = [job for job in self._handed_in if job.code is None]

    def _hand_in(self, jobs: Sequence[SlurmJob]) -> None:
        """Submit an array. While Slurm does not answer the jobs keep waiting; a refused one has failed."""
        name = f"{PREFIX}{secrets.token_hex(4)}"
        for task, job in enumerate(jobs):
            job.record = TaskRecord(name=name, task=task)
            # Written before Slurm has the job: a campaign that is killed here finds it by its name.
            job.record.write(job.folder)
        folders = [job.folder for job in jobs]
        arguments = self._options.arguments(jobs[0].num_gpus, jobs[0].cwd, self._grace_s)
        script = array_script(folders, jobs[0].cwd, self._options.setup)
        job_id: str | None = None
        try:
            job_id = slurm_commands.submit([*arguments, f"--job-name={name}", f"--array=0-{len(jobs) - 1}"], script)
        except SlurmError as error:
            # After a timeout only the answer may be lost: the name shows whether Slurm has the array.
            listing = self._ask()
            if listing is None:
                with self._lock:
                    self._waiting = [*jobs, *self._waiting]
                return
            job_id = listing.job_id(name)
            if job_id is None:
                for job in jobs:
                    job.end(EXIT_USAGE, f"Slurm refuses the job: {error}")
                return
        for job in jobs:
            job.record = replace(job.record, job_id=job_id)
            job.record.write(job.folder)
        with self._lock:
            self._handed_in += jobs

    def _ask(self) -> Listing | None:
        """Return all jobs; None, with one warning, while Slurm does not answer."""
        try:
            listing = slurm_commands.listing()
        except SlurmError as error:
            if not self._is_away:
                LOG.warning("Slurm does not answer and is waited for: %s", error)
            self._is_away = True
            return None
        if self._is_away:
            LOG.warning("Slurm answers again")
            self._is_away = False
        return listing

    def _pass_on(self, jobs: Sequence[SlurmJob], listing: Listing) -> None:
        """Pass each job's request on, once: a waiting job is cancelled, a running one gets the signal."""
        ids: dict[tuple[str, ...], list[str]] = defaultdict(list)
        asked = {job: job.request for job in jobs}
        for job, request in asked.items():
            state = listing.of(job.record.name, job.record.task)
            is_waiting = state is not None and state.state == "PENDING"
            ids[() if is_waiting else request].append(job.shown)
        try:
            for options, some in ids.items():
                slurm_commands.cancel(some, *options)
        except SlurmError as error:
            LOG.warning("Slurm did not take a request to stop jobs; it is repeated: %s", error)
            return
        for job, request in asked.items():
            if job.request == request:
                job.request = ()


@dataclass(slots=True, eq=False)
class SlurmJob:
    """A task of a job array. `code` is set once, by the launcher's thread."""

    launcher: SlurmLauncher
    folder: Path
    cwd: Path = Path()
    num_gpus: int = 0
    record: TaskRecord = field(default_factory=lambda: TaskRecord(name="", task=0))
    request: tuple[str, ...] = ()  # options of `scancel`
    code: int | None = None
    is_stopped: bool = False
    pid: int | None = None

    @property
    def shown(self) -> str:
        return f"{self.record.job_id}_{self.record.task}"

    def poll(self) -> int | None:
        return self.code

    def stop(self) -> None:
        """SIGTERM to the run itself; one that has not begun is cancelled."""
        self._ask(STOP)

    def kill(self) -> None:
        self._ask(KILL)

    def _ask(self, request: tuple[str, ...]) -> None:
        self.is_stopped = True
        if self.launcher.withdraw(self):
            self.code = EXIT_RESUMABLE
        elif self.code is None:
            self.request = request
            self.launcher.wake()

    def update(self, listing: Listing) -> None:
        """Record how the job has ended; one that Slurm has forgotten ended as the records of the run say."""
        state = listing.of(self.record.name, self.record.task)
        # A task that is cancelled before it starts leaves no trace.
        if state is None and self.is_stopped:
            self.end(EXIT_RESUMABLE, "")
        elif state is None:
            self.end(recorded_code(self.folder), f"Slurm has forgotten job {self.shown}")
        elif state.has_ended:
            code = EXIT_RESUMABLE if self.is_stopped and state.state == "CANCELLED" else state.code
            told = "" if state.state in ("COMPLETED", "FAILED") else state.text
            if code == NOT_SEEN:
                told = f"node {state.nodes} does not see {self.folder}, or the current folder: choose shared ones"
            self.end(code, told)

    def end(self, code: int, message: str) -> None:
        """Set the exit code; Slurm's message goes to the run's log of errors."""
        if message:
            with suppress(OSError), (self.folder / "stderr.log").open("a", encoding="utf-8") as stream:
                stream.write(f"{message}\n")
        self.code = code


# A node executes one script for a job array, and `slurm.sh` in the folder of each run: the command line and the
# variables that differ from the campaign's environment, secrets among them. Only its owner can read that file, and the
# run removes it.
START, RECORD = "slurm.sh", "slurm.json"
# The `EX_NOINPUT` of sysexits.h; no run returns it.
NOT_SEEN = 66
SCRIPT = """\
#!/bin/sh
# Runs of a retrain campaign, one for each task of the array.
case "$SLURM_ARRAY_TASK_ID" in
{cases}
esac
cd {cwd} && [ -f "$folder/{start}" ] || exit {not_seen}
exec </dev/null >>"$folder/stdout.log" 2>>"$folder/stderr.log"
{setup}
. "$folder/{start}"
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskRecord:
    """Array and task of a run; `job_id` is empty until Slurm has assigned it."""

    name: str
    task: int
    job_id: str = ""

    def write(self, folder: Path) -> None:
        """Keep it in the run's folder, for a later session of the campaign."""
        write_json(folder / RECORD, asdict(self))

    @classmethod
    def read(cls, folder: Path) -> TaskRecord | None:
        """The record in a run's folder; None if it is missing or damaged."""
        with suppress(OSError, ValueError, TypeError, KeyError, ConfigError), open_regular(folder / RECORD) as stream:
            content = json.loads(stream.read())
            return cls(name=str(content["name"]), task=int(content["task"]), job_id=str(content["job_id"]))
        return None


def array_script(folders: Sequence[Path], cwd: Path, setup: Sequence[str]) -> str:
    """The script of an array whose task `n` is the run in `folders[n]`; `setup` are shell lines of the user."""
    cases = "\n".join(f"{task}) folder={shlex.quote(str(folder))} ;;" for task, folder in enumerate(folders))
    return SCRIPT.format(cases=cases, cwd=shlex.quote(str(cwd)), start=START, not_seen=NOT_SEEN, setup="\n".join(setup))
