"""Launcher `subprocess`: a process of this machine for each run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress

from pydantic import BaseModel, ConfigDict

from retrain.campaign.devices import VARIABLE, DevicePool, listed_devices
from retrain.campaign.launching import Job
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, Problem
from retrain.text.process import python_command

THREADS = "OMP_NUM_THREADS"
GUARD = (*python_command(), "-m", "retrain.campaign.parent_death")


class Options(BaseModel):
    """The launcher has no options."""

    model_config = ConfigDict(extra="forbid")


def build(context: PluginContext) -> ProcessLauncher:
    """Build the launcher."""
    return ProcessLauncher(DevicePool(listed_devices(context.config.backend.devices)))


class ProcessLauncher:
    """Starts processes, assigns GPUs and divides the cores: `OMP_NUM_THREADS` is the run's share unless it is set."""

    def __init__(self, devices: DevicePool) -> None:
        self._devices = devices

    def start(self, job: Job) -> ProcessJob:
        """Start the run's process; it gets SIGTERM if this one dies."""
        gpus = self._devices.take(job.num_gpus)
        visible = {VARIABLE: ",".join(gpus)} if gpus else {}
        environ = {THREADS: str(job.num_cpus), **os.environ, **visible, **job.environ}
        try:
            return ProcessJob(start_process(job, environ), self._devices, gpus)
        except OSError as error:
            self._devices.give_back(gpus)
            what = f"{job.name} cannot be started: {error.strerror or error}"
            fix = "check that memory, processes and disk are not exhausted"
            raise BackendError(Problem(what=what, fix=fix)) from error

    def close(self) -> None:
        """Nothing to release."""


class ProcessJob:
    """A run's process, in a process group of its own, so that Ctrl-C reaches it only through the campaign."""

    def __init__(self, process: subprocess.Popen[bytes], devices: DevicePool, gpus: list[str]) -> None:
        self._process, self._devices, self._gpus = process, devices, gpus
        self.pid: int | None = process.pid

    def poll(self) -> int | None:
        """Exit code; negative for a signal."""
        code = self._process.poll()
        if code is not None:
            self._devices.give_back(self._gpus)
            self._gpus = []
        return code

    def stop(self) -> None:
        """Send SIGTERM."""
        with suppress(OSError):
            self._process.terminate()

    def kill(self) -> None:
        """Send SIGKILL to the run and everything that it started."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)


def start_process(job: Job, environ: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Start the job with its output appended to its logs; OSError if that fails."""
    with (job.folder / "stdout.log").open("ab") as out, (job.folder / "stderr.log").open("ab") as err:
        return subprocess.Popen(
            [*GUARD, str(os.getpid()), *job.argv],
            cwd=job.cwd,
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            process_group=0,
        )
