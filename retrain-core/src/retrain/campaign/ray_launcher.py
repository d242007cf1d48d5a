"""Launcher `ray`: each run is a task of an existing Ray cluster, on any node with room for it.

All nodes must see the campaign's folder under the same path (checked before the first run starts) and have
retrain installed. A task runs on one node: the GPUs of a run are never spread over several.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from retrain.campaign.launching import Job
from retrain.campaign.processes import THREADS, start_process
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import EXIT_RESUMABLE, BackendError, ConfigError, PluginError, Problem
from retrain.kernel.plugins.missing import install_line

LOG = logging.getLogger("retrain")
# The exit code of a run whose worker is gone: the run is resumed as after a kill.
LOST = -int(signal.SIGKILL)
PAUSE_S = 0.2  # between two looks at the process of a run, and at all tasks
SHARE = "start the campaign in a folder that all nodes share, or give them --log-dir and runtime_env.working_dir"
# A busy node may need this long to answer.
CHECK_S = 60.0
CONNECT_S = 10.0
# Nodes have their own environment, where these variables may be missing.
PASSED_ON = ("RETRAIN_", "HF_", "WANDB_", "TINKER_", "PYTHONPATH")


class Options(BaseModel):
    """`[campaign.launcher_options]`: address of the cluster, and the resources of each run."""

    model_config = ConfigDict(extra="forbid", strict=True)
    address: str = ""  # of the cluster; empty = RAY_ADDRESS, or the one that runs on this machine
    num_cpus: int = Field(default=1, ge=1)  # cores per run, and OMP_NUM_THREADS
    num_gpus: float | None = Field(default=None, ge=0.0)  # per run; None = as [backend] devices says, if there are any
    memory: float | None = Field(default=None, gt=0.0)  # bytes per run that Ray reserves
    resources: dict[str, float] = Field(default_factory=dict)  # custom resources per run
    accelerator_type: str = ""  # of the GPUs, as "A100"; empty = any
    scheduling_strategy: Literal["DEFAULT", "SPREAD"] = "DEFAULT"  # fill a node first, or spread runs over nodes
    runtime_env: dict[str, Any] = Field(default_factory=dict)  # of Ray: `working_dir` if nodes lack the current folder


def build(context: PluginContext) -> RayLauncher:
    """Connect to the cluster. PluginError without Ray, ConfigError when no cluster answers."""
    options = context.params if isinstance(context.params, Options) else Options()
    try:
        import ray
    except ImportError as error:
        where, what = context.config.place("campaign.launcher"), f"launcher 'ray' needs the package 'ray': {error}"
        fix = f"install it: {install_line('retrain-core', 'ray')}"
        raise PluginError(Problem(code="plugin.missing-package", where=where, what=what, fix=fix)) from error
    address = options.address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        host, _, port = address.removeprefix("ray://").rpartition(":")
        # Ray itself would retry for minutes where nothing listens.
        if host and port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S).close()
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.WARNING)
    except Exception as error:  # ConnectionError, ValueError, and Ray's own classes
        where = context.config.place("campaign.launcher_options")
        what = f"no Ray cluster at {address!r}: {error}"
        fix = "start one with `ray start --head`, or set RAY_ADDRESS or launcher_options.address"
        raise ConfigError(Problem(code="campaign.no-ray-cluster", where=where, what=what, fix=fix)) from error
    found: dict[str, float] = ray.cluster_resources()
    return RayLauncher(options, has_gpus=found.get("GPU", 0) > 0)


class RayLauncher:
    """Submits tasks with cores, GPUs and custom resources, and without retries by Ray."""

    def __init__(self, options: Options, *, has_gpus: bool) -> None:
        self._options = options
        self._has_gpus = has_gpus
        self._unseen: str | None = None  # folders that nodes do not see; empty once every node has answered
        self._told: set[float] = set()  # numbers of GPUs that no node has
        self._open: dict[Any, RayJob] = {}  # by the reference of the task
        self._looked = 0.0

    def start(self, job: Job) -> RayJob:
        """Submit the run; it starts when the cluster has room. BackendError when a node cannot see its folder."""
        import ray

        job = replace(job, folder=job.cwd / job.folder)  # a worker has another current folder
        if self._unseen is None:
            self._unseen = self._unseen_folders(job)
        if self._unseen:
            what = f"nodes of the cluster do not see folders of the campaign ({self._unseen})"
            raise BackendError(Problem(code="campaign.unshared-folder", what=what, fix=SHARE))
        configured = self._options.num_gpus
        num_gpus = job.num_gpus * self._has_gpus if configured is None else configured
        passed = {name: value for name, value in os.environ.items() if name.startswith(PASSED_ON)}
        environ = {**passed, THREADS: str(self._options.num_cpus), **job.environ}
        self._tell_of_room(num_gpus)
        options = self._options.model_dump(include={"memory", "resources", "accelerator_type"})
        task = ray.remote(run_job).options(
            name=job.name,
            max_retries=0,  # the campaign retries: it resumes the run, or moves its records aside
            runtime_env=self._runtime_env(environ),
            num_cpus=self._options.num_cpus,
            num_gpus=num_gpus,
            scheduling_strategy=self._options.scheduling_strategy,
            **{name: value for name, value in options.items() if value},
        )
        try:
            reference = task.remote(job, environ)
            self._open[reference] = RayJob(self, reference, job.folder)
            return self._open[reference]
        except Exception as error:
            what = f"Ray refuses {job.name}: {type(error).__name__}: {error}"
            fix = "check that the cluster has the resources in [campaign] launcher_options: `ray status`"
            raise BackendError(Problem(code="campaign.ray-refused", what=what, fix=fix)) from error

    def look(self) -> None:
        """Update all tasks that have ended, with one question to Ray every `PAUSE_S` at most."""
        import ray

        if not self._open or time.monotonic() - self._looked < PAUSE_S:
            return
        ended, _ = ray.wait([*self._open], num_returns=len(self._open), timeout=0, fetch_local=False)
        for reference in ended:
            self._open.pop(reference).end()
        self._looked = time.monotonic()

    def _runtime_env(self, environ: Mapping[str, str]) -> dict[str, Any]:
        path = {"PYTHONPATH": environ["PYTHONPATH"]} if "PYTHONPATH" in environ else {}
        variables = path | self._options.runtime_env.get("env_vars", {})
        return self._options.runtime_env | ({"env_vars": variables} if variables else {})

    def _unseen_folders(self, job: Job) -> str:
        """The nodes that could run the job, but do not see its folders; empty if all do."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        mark = job.folder / f".seen-{secrets.token_hex(4)}"
        mark.touch()
        needs_cwd = "working_dir" not in self._options.runtime_env
        task, runtime_env = ray.remote(unseen), self._runtime_env(os.environ)
        nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0)]
        asked = {}
        for node in nodes:
            there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            on_node = task.options(num_cpus=0, max_retries=0, runtime_env=runtime_env, scheduling_strategy=there)
            asked[on_node.remote([mark, *([job.cwd] if needs_cwd else [])])] = node["NodeManagerAddress"]
        try:
            ended, silent = ray.wait([*asked], num_returns=len(asked), timeout=CHECK_S)
            found = {asked[each]: folders for each in ended if (folders := ray.get(each))}
        except Exception as error:  # a node that dies meanwhile, a worker that cannot start
            what, fix = f"a node does not answer: {error}", "see `ray status`, and start the campaign again"
            raise BackendError(Problem(code="campaign.ray-silent", what=what, fix=fix)) from error
        finally:
            mark.unlink(missing_ok=True)
        if silent:
            LOG.warning("Ray nodes did not say whether they see %s: %s", job.folder, [asked[each] for each in silent])
        return "; ".join(f"{node}: {', '.join(folders)}" for node, folders in sorted(found.items()))

    def _tell_of_room(self, num_gpus: float) -> None:
        """Warn once when no node is large enough: Ray would wait for one silently."""
        import ray

        cpus = self._options.num_cpus
        held = [node["Resources"] for node in ray.nodes() if node["Alive"]] if num_gpus not in self._told else []
        if held and not any(each.get("CPU", 0) >= cpus and each.get("GPU", 0) >= num_gpus for each in held):
            LOG.warning("No node of the cluster has %d cores and %g GPUs: runs wait until one joins", cpus, num_gpus)
        self._told.add(num_gpus)

    def close(self) -> None:
        import ray

        with suppress(Exception):  # the cluster may be gone
            ray.shutdown()


class RayJob:
    """A task of a Ray cluster, possibly on another node."""

    def __init__(self, launcher: RayLauncher, reference: Any, folder: Path) -> None:
        self._launcher, self._reference, self._folder = launcher, reference, folder
        self._is_stopped = False
        self._code: int | None = None
        self.pid: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._launcher.look()
        return self._code

    def end(self) -> None:
        """Record how the task has ended; Ray's message about a lost one goes to the run's log of errors."""
        import ray

        try:
            self._code = int(ray.get(self._reference))
        except Exception as error:  # a worker or node that died, a cancelled task
            self._code = EXIT_RESUMABLE if self._is_stopped else LOST
            if not self._is_stopped:
                with suppress(OSError), (self._folder / "stderr.log").open("a", encoding="utf-8") as stream:
                    stream.write(f"Ray: {type(error).__name__}: {' '.join(str(error).split())}\n")

    def kill(self) -> None:
        self.stop(force=True)

    def stop(self, *, force: bool = False) -> None:
        """Interrupt the task, and so stop its process; a pending task is cancelled."""
        import ray

        self._is_stopped = True
        with suppress(Exception):  # it may have ended meanwhile
            ray.cancel(self._reference, force=force)


def unseen(paths: Sequence[Path]) -> list[str]:
    """The paths that a node does not see; called inside a Ray worker."""
    return [str(path.parent if path.name.startswith(".seen-") else path) for path in paths if not path.exists()]


def run_job(job: Job, environ: dict[str, str]) -> int:
    """Run the job's process to its end, inside a Ray worker; an interrupt is passed on as SIGTERM."""
    if not job.folder.is_dir():
        raise FileNotFoundError(f"node {socket.gethostname()} does not see {job.folder}")
    job = job if job.cwd.is_dir() else replace(job, cwd=Path.cwd())  # the `working_dir` of the runtime environment
    process = start_process(job, {**os.environ, **environ})
    while True:
        try:
            while (code := process.poll()) is None:
                time.sleep(PAUSE_S)
            return code
        except KeyboardInterrupt:  # `ray.cancel`
            with suppress(OSError):
                process.terminate()
