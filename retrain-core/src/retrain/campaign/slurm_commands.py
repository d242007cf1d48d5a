"""The commands of Slurm: `sbatch`, `squeue`, `scancel` and `sinfo`, each once for many runs."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from retrain.kernel.errors import EXIT_DONE, EXIT_FAILED, EXIT_RESUMABLE

PROGRAMS = ("sbatch", "squeue", "scancel", "sinfo")
# A controller that is down makes each command fail after some 10 s; a busy one takes longer.
ANSWER_S = 60.0
# Keeps a command line of job ids far below the limit of the kernel (128 KiB for one argument, 2 MiB in all).
IDS_AT_ONCE = 500
PREFIX = "retrain-"  # of the names of our jobs
# squeue cuts every column silently at its width, so each width holds the longest value.
COLUMNS = {"ArrayJobID": 24, "ArrayTaskID": 64, "State": 24, "exit_code": 16, "Name": 40, "NodeList": 64, "Reason": 120}
ENDED = frozenset(
    ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT")
)
# After a limit or a preemption the run itself is sound: it is continued.
CODES = dict.fromkeys(("DEADLINE", "PREEMPTED", "TIMEOUT"), EXIT_RESUMABLE)
CODES |= {"COMPLETED": EXIT_DONE, "CANCELLED": -int(signal.SIGTERM)}


class SlurmError(Exception):
    """A command of Slurm failed; holds its output."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskState:
    """A task of a job array as `squeue` lists it. `status` is its exit status in the form of `os.wait`."""

    job_id: str
    state: str
    status: int = 0
    nodes: str = ""
    reason: str = ""

    @property
    def has_ended(self) -> bool:
        return self.state in ENDED

    @property
    def code(self) -> int:
        if self.state == "FAILED":
            return -(self.status & 127) or self.status >> 8 or EXIT_FAILED
        return CODES.get(self.state, -int(signal.SIGKILL))

    @property
    def text(self) -> str:
        where = f" on {self.nodes}" if self.nodes and self.nodes != "N/A" else ""
        return f"Slurm job {self.job_id} ended as {self.state}{where}"


class Listing:
    """The jobs of this user that Slurm knows, including those that ended in the last minutes."""

    def __init__(self, tasks: Mapping[tuple[str, int | None], TaskState]) -> None:
        self._tasks = tasks

    def of(self, name: str, task: int) -> TaskState | None:
        """A task of the array called `name`; tasks that never started share the line of their array."""
        return self._tasks.get((name, task)) or self._tasks.get((name, None))

    def job_id(self, name: str) -> str | None:
        return next((each.job_id for (known, _), each in self._tasks.items() if known == name), None)


def submit(options: Sequence[str], script: str) -> str:
    """Submit a job script; returns its id."""
    return _answer("sbatch", "--parsable", *options, text=script).strip().partition(";")[0]


def listing() -> Listing:
    """All jobs of this user, in one query."""
    columns = ",".join(f"{name}:{width}" for name, width in COLUMNS.items())
    lines = _answer("squeue", "--me", "--array", "--states=all", "--noheader", f"--Format={columns}").splitlines()
    found = {}
    for line in lines:
        cells, start = {}, 0
        for name, width in COLUMNS.items():
            cells[name] = line[start : start + width].strip()
            start += width
        if not cells["Name"].startswith(PREFIX):
            continue
        task = int(cells["ArrayTaskID"]) if cells["ArrayTaskID"].isdigit() else None
        found[cells["Name"], task] = TaskState(
            job_id=cells["ArrayJobID"],
            state=cells["State"],
            status=_status(cells["exit_code"]),
            nodes=cells["NodeList"],
            reason=cells["Reason"],
        )
    return Listing(found)


def cancel(ids: Sequence[str], *options: str) -> None:
    """`scancel` for many tasks; it is no error if one has ended already."""
    for start in range(0, len(ids), IDS_AT_ONCE):
        try:
            _answer("scancel", "--quiet", *options, *ids[start : start + IDS_AT_ONCE])
        except SlurmError as error:
            if "Invalid job id" not in str(error) and "already complet" not in str(error):
                raise


def generic_resources(partition: str) -> list[str]:
    """Resources of a partition's nodes (empty: all nodes) in addition to cores and memory, one entry per kind."""
    return _answer("sinfo", "--noheader", "--format=%G", *([f"--partition={partition}"] * bool(partition))).split()


def _status(text: str) -> int:
    """An exit status as of `os.wait`, from that number or from `code:signal`."""
    # Versions differ in the form that `exit_code` has in --Format.
    code, colon, number = text.partition(":")
    if not code.isdigit():
        return 0
    return (int(code) << 8 | int(number or 0)) if colon else int(code)


def _answer(program: str, *arguments: str, text: str = "") -> str:
    """The output of a command; SlurmError when it fails or does not answer.

    A campaign that is a Slurm job itself does not pass its own job's variables on.
    """
    kept = [name for name in os.environ if name == "SLURM_CONF" or not name.startswith("SLURM_")]
    environ, command = {name: os.environ[name] for name in kept}, [program, *arguments]
    try:
        done = subprocess.run(command, input=text, env=environ, capture_output=True, text=True, timeout=ANSWER_S)
    except subprocess.TimeoutExpired as error:
        raise SlurmError(f"{program} did not answer within {ANSWER_S:g} s") from error
    except OSError as error:
        raise SlurmError(f"{program}: {error.strerror or error}") from error
    if done.returncode:
        message = " ".join(done.stderr.split()) or f"exit code {done.returncode}"
        raise SlurmError(message if message.startswith(program) else f"{program}: {message}")
    return done.stdout
