"""Launcher `subprocess`: a process of this machine for each run."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from pydantic import BaseModel, ConfigDict

from retrain.campaign.launching import Job
from retrain.campaign.load import listed_devices
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import BackendError, Problem
from retrain.text.process import python_command

VARIABLE = "CUDA_VISIBLE_DEVICES"
THREADS = "OMP_NUM_THREADS"
GUARD = (*python_command(), "-m", "retrain.campaign.parent_death")


class Options(BaseModel):
    model_config = ConfigDict(extra="forbid")


def build(context: PluginContext) -> ProcessLauncher:
    return ProcessLauncher(DevicePool(listed_devices(context.config.backend.devices)))


class ProcessLauncher:
    """Starts processes, assigns GPUs and divides the cores: `OMP_NUM_THREADS` is the run's share unless it is set."""

    def __init__(self, devices: DevicePool) -> None:
        self._devices = devices

    def start(self, job: Job) -> ProcessJob:
        gpus = self._devices.take(job.num_gpus)
        visible = {VARIABLE: ",".join(gpus)} if gpus else {}
        environ = {THREADS: str(job.num_cpus), **os.environ, **visible, **job.environ}
        try:
            return ProcessJob(start_process(job, environ), self._devices, gpus)
        except OSError as error:
            self._devices.give_back(gpus)
            what = f"{job.name} cannot be started: {error.strerror or error}"
            fix = "check that memory, processes and disk are not exhausted"
            raise BackendError(Problem(code="campaign.cannot-start", what=what, fix=fix)) from error

    def close(self) -> None: ...


class ProcessJob:
    """A run's process, in a separate process group, so that Ctrl-C reaches it only through the campaign."""

    def __init__(self, process: subprocess.Popen[bytes], devices: DevicePool, gpus: list[str]) -> None:
        self._process, self._devices, self._gpus = process, devices, gpus
        self.pid: int | None = process.pid

    def poll(self) -> int | None:
        code = self._process.poll()
        if code is not None:
            self._devices.give_back(self._gpus)
            self._gpus = []
        return code

    def stop(self) -> None:
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


class DevicePool:
    """Counts the runs on each GPU; the next run gets those with the fewest, in the order in which they are listed."""

    def __init__(self, names: list[str], environ: Mapping[str, str] = os.environ) -> None:
        visible = listed_devices(environ.get(VARIABLE, ""))
        # A single device is shared by all runs.
        assigned = names if len(names) > 1 else []
        numbers = [int(name.removeprefix("gpu:")) for name in assigned if name.startswith("gpu:")]
        self._names = [visible[n] if n < len(visible) else str(n) for n in numbers]
        self._users: Counter[str] = Counter()

    def take(self, count: int) -> list[str]:
        """Names for `CUDA_VISIBLE_DEVICES`; empty if there is nothing to assign."""
        chosen = sorted(self._names, key=lambda name: self._users[name])[:count]
        self._users.update(chosen)
        return sorted(chosen, key=self._names.index)

    def give_back(self, names: list[str]) -> None:
        self._users.subtract(names)
