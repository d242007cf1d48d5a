"""Launcher `{{ cookiecutter.name }}`: runs of a campaign as low-priority processes."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress

from pydantic import BaseModel, ConfigDict, Field
from retrain.api import BackendError, Job, PluginContext, {% if cookiecutter.form == "file" %}PluginSpec, {% endif %}Problem


class Options(BaseModel):
    """`[campaign.launcher_options]`: the niceness of the runs, in [0, 19]."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    nice: int = Field(default=10, ge=0, le=19)


class PoliteJob:
    """A run's process, in its own process group, so that `kill` ends everything the run has started."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process
        self.pid: int | None = process.pid

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while the run is going."""
        return self._process.poll()

    def stop(self) -> None:
        """SIGTERM: the run saves its state and ends."""
        with suppress(OSError):
            self._process.terminate()

    def kill(self) -> None:
        """SIGKILL to the whole group."""
        with suppress(OSError):
            os.killpg(self._process.pid, signal.SIGKILL)


class PoliteLauncher:
    """Starts every job under `nice`, a program of Linux and macOS."""

    def __init__(self, nice: int) -> None:
        self.nice = nice

    def start(self, job: Job) -> PoliteJob:
        """Start the run's process; BackendError when that fails."""
        threads = {"OMP_NUM_THREADS": str(job.num_cpus)}
        try:
            with (job.folder / "stdout.log").open("ab") as out, (job.folder / "stderr.log").open("ab") as err:
                process = subprocess.Popen(
                    ["nice", "-n", str(self.nice), *job.argv],
                    cwd=job.cwd,
                    env={**threads, **os.environ, **job.environ},
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=err,
                    process_group=0,
                )
        except OSError as error:
            what = f"{job.name} cannot be started: {error.strerror or error}"
            fix = "check that the command exists and that the machine has processes and disk space left"
            raise BackendError(Problem(what=what, fix=fix)) from error
        return PoliteJob(process)

    def close(self) -> None:
        """Holds no resources."""


def create(context: PluginContext) -> PoliteLauncher:
    """The launcher that `[campaign.launcher_options]` describes."""
    options = context.params if isinstance(context.params, Options) else Options()
    return PoliteLauncher(options.nice)
{% if cookiecutter.form == "file" %}


PLUGIN = PluginSpec(
    name="{{ cookiecutter.name }}",
    summary="{{ cookiecutter.description }}",
    factory=create,
    params=Options,
)
{% endif %}
