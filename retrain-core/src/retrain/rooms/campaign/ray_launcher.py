"""Launcher `ray`: each run is a task of an existing Ray cluster, on any node with room for it.

All nodes must see the campaign's folder under the same path, and have retrain installed.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import EXIT_RESUMABLE, BackendError, ConfigError, PluginError, Problem
from retrain.kernel.plugins.first_party import install_line
from retrain.rooms.campaign.launching import Job
from retrain.rooms.campaign.processes import THREADS, start_process

LOST = -int(signal.SIGKILL)  # exit code of a run whose worker is gone
PAUSE_S = 0.2
CONNECT_S = 10.0
PASSED_ON = ("RETRAIN_", "HF_", "WANDB_", "TINKER_", "PYTHONPATH")  # variables that may be missing on the nodes


class Options(BaseModel):
    """`[campaign.launcher_options]`: address of the cluster, and the resources of each run."""

    model_config = ConfigDict(extra="forbid", strict=True)
    address: str = ""  # of the cluster; empty = RAY_ADDRESS, or the one that runs on this machine
    num_cpus: int = Field(default=1, ge=1)  # cores per run, and OMP_NUM_THREADS
    num_gpus: float | None = Field(default=None, ge=0.0)  # per run; None = as [backend] devices says, if there are any
    resources: dict[str, float] = Field(default_factory=dict)  # custom resources per run


def build(context: PluginContext) -> RayLauncher:
    """Connect to the cluster. PluginError without Ray, ConfigError when no cluster answers."""
    options = context.params if isinstance(context.params, Options) else Options()
    try:
        import ray
    except ImportError as error:
        fix = install_line("retrain-core", "ray")
        raise PluginError(Problem(where=context.config.place("campaign.launcher"), what=str(error), fix=fix)) from error
    address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        _check_listening(address)
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # ConnectionError, ValueError, and others of its own
        where = context.config.place("campaign.launcher_options")
        what = f"no Ray cluster at {address!r}: {error}"
        fix = "start one with `ray start --head`, or set RAY_ADDRESS or launcher_options.address"
        raise ConfigError(Problem(where=where, what=what, fix=fix)) from error
    found: dict[str, float] = ray.cluster_resources()
    return RayLauncher(options, has_gpus=found.get("GPU", 0) > 0)


def _check_listening(address: str) -> None:
    """OSError if nothing listens at `host:port`: Ray itself would retry for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()


class RayLauncher:
    """Submits tasks with cores, GPUs and custom resources, and without retries by Ray."""

    def __init__(self, options: Options, *, has_gpus: bool) -> None:
        self._options = options
        self._has_gpus = has_gpus

    def start(self, job: Job) -> RayJob:
        """Submit the run; it starts when the cluster has room."""
        import ray

        num_gpus = self._options.num_gpus
        if num_gpus is None:
            num_gpus = job.num_gpus if self._has_gpus else 0
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        environ = {**passed, THREADS: str(self._options.num_cpus), **job.environ}
        task = ray.remote(run_job).options(
            name=job.name,
            num_cpus=self._options.num_cpus,
            num_gpus=num_gpus,
            resources=self._options.resources or None,
            max_retries=0,  # the campaign retries: it resumes the run, or moves its records aside
            runtime_env={"env_vars": {"PYTHONPATH": environ["PYTHONPATH"]}} if "PYTHONPATH" in environ else None,
        )
        try:
            return RayJob(task.remote(job, environ))
        except Exception as error:
            what = f"Ray refuses {job.name}: {type(error).__name__}: {error}"
            fix = "check that the cluster has the resources in [campaign] launcher_options: `ray status`"
            raise BackendError(Problem(what=what, fix=fix)) from error

    def close(self) -> None:
        """Leave the cluster."""
        import ray

        with suppress(Exception):  # the cluster may be gone
            ray.shutdown()


class RayJob:
    """A task of a Ray cluster, which may run on another node."""

    def __init__(self, reference: Any) -> None:
        self._reference = reference
        self._is_stopped = False
        self.pid: int | None = None

    def poll(self) -> int | None:
        """Exit code of the run; `LOST` if its worker or node is gone."""
        import ray

        ready, _ = ray.wait([self._reference], timeout=0)
        if not ready:
            return None
        try:
            return int(ray.get(self._reference))
        except Exception:  # a worker or node that died, a cancelled task
            return EXIT_RESUMABLE if self._is_stopped else LOST

    def stop(self) -> None:
        """Interrupt the task, which asks its process to stop; a pending task is cancelled."""
        self._cancel(force=False)

    def kill(self) -> None:
        """Kill the task's worker, and with it the run."""
        self._cancel(force=True)

    def _cancel(self, *, force: bool) -> None:
        import ray

        self._is_stopped = True
        with suppress(Exception):  # it may have ended meanwhile
            ray.cancel(self._reference, force=force)


def run_job(job: Job, environ: dict[str, str]) -> int:
    """Run the job's process to its end, inside a Ray worker; an interrupt is passed on as SIGTERM."""
    job.folder.mkdir(parents=True, exist_ok=True)
    process = start_process(job, {**os.environ, **environ})
    while True:
        try:
            while (code := process.poll()) is None:
                time.sleep(PAUSE_S)
            return code
        except KeyboardInterrupt:  # `ray.cancel`
            _ask_to_stop(process)


def _ask_to_stop(process: subprocess.Popen[bytes]) -> None:
    with suppress(OSError):
        process.terminate()
