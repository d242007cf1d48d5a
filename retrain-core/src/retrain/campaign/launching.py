"""The contract between a campaign and the launchers of its runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A run of a campaign as a process.

    `environ` holds the differences from the campaign's own environment. The process runs in `cwd`; its output is
    appended to `stdout.log` and `stderr.log` in `folder`. That folder exists. `num_cpus` and `num_gpus` are its share.
    """

    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    cwd: Path
    folder: Path
    num_cpus: int = 1
    num_gpus: int = 0


class RunningJob(Protocol):
    """A job that was started. `pid` is its process on this machine, None if it runs on another one."""

    pid: int | None

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal as in `subprocess`; None while it runs. Never blocks."""

    def stop(self) -> None:
        """Request that it saves its state and ends (SIGTERM); returns at once."""

    def kill(self) -> None:
        """End it now; returns at once."""


class Launcher(Protocol):
    """Starts the runs of a campaign, each in a separate process, and returns without waiting for them.

    A run that is lost (its machine, its worker) must end in `poll` with a code that is not 0: the campaign then reads
    its progress from its folder, and continues it. 75 means that the run itself is sound (a time limit, a preemption):
    it does not count as a failed attempt as long as the run makes progress each time. A launcher whose jobs outlive the
    campaign's process is also a `FindsJobs`.
    """

    def start(self, job: Job) -> RunningJob:
        """Start one job; BackendError when that is impossible now."""

    def close(self) -> None:
        """Release everything that was acquired; no job is running any more."""


@runtime_checkable
class FindsJobs(Protocol):
    """A launcher whose jobs outlive the campaign's process, so that the next session finds them.

    Called once for each run that is not done, before anything is started.
    """

    def find(self, name: str, folder: Path) -> RunningJob | None:
        """The unfinished job that an earlier session started for a run, or None; BackendError if that is unknown."""
