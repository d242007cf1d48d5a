"""What starts the runs of a campaign: the contract between the campaign and its launchers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run of a campaign as a process.

    `environ` holds what differs from the campaign's own environment. The process runs in `cwd`; its output is appended
    to `stdout.log` and `stderr.log` in `folder`, which exists. `num_cpus` and `num_gpus` are what it should get.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: Path
    folder: Path
    num_cpus: int = 1
    num_gpus: int = 0


class RunningJob(Protocol):
    """A job that was started. `pid` is its process on this machine, None where it has none here."""

    pid: int | None

    def poll(self) -> int | None:
        """Exit code, negative for a signal as in `subprocess`; None while it goes on. Never blocks."""

    def stop(self) -> None:
        """Ask it to save its state and end (SIGTERM); returns at once."""

    def kill(self) -> None:
        """End it now; returns at once."""


class Launcher(Protocol):
    """Starts the runs of a campaign, each in a process of its own, and returns without waiting for them.

    A run that is lost (its machine, its worker) must end in `poll` with a code that is not 0: the campaign then reads
    from its folder how far it got, and continues it. 75 means that the run itself is sound (a time limit, a
    preemption): as long as it gets further each time, that does not count as a failed attempt. A launcher whose jobs
    outlive the campaign's process is a `FindsJobs`, too.
    """

    def start(self, job: Job) -> RunningJob:
        """Start one job; BackendError when that is impossible now."""

    def close(self) -> None:
        """Let go of all that was acquired; no job is running any more."""


@runtime_checkable
class FindsJobs(Protocol):
    """A launcher whose jobs go on when the campaign's process has ended: the next session asks for them.

    Asked once for each run that is not done, before anything is started.
    """

    def find(self, name: str, folder: Path) -> RunningJob | None:
        """The job that an earlier session started for a run, if it has not ended; BackendError if that is unknown."""
