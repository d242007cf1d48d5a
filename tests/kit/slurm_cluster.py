"""Slurm itself on this machine: one node with eight cores and four GPUs that are not there, run by root."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from tests.kit.server_process import free_port

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
CONFIG = """\
ClusterName=retrain
SlurmctldHost={host}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
SlurmdParameters=config_overrides
ProctrackType=proctrack/pgid
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
KillWait=2
GresTypes=gpu
NodeName={host} CPUs=8 RealMemory=1000 Gres=gpu:4
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
DEVICES = "Name=gpu File={files}\n"
READY_S = 60.0


def missing() -> str:
    """Why Slurm cannot be started here, or nothing."""
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"needs {', '.join(absent)}: apt-get install munge slurmctld slurmd slurm-client"
    return "" if os.geteuid() == 0 else "slurmd starts jobs as root only"


class SlurmCluster:
    """Authentication, controller and node as three daemons, with everything they keep in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.config = folder, folder / "slurm.conf"
        self._environ = {**os.environ, "SLURM_CONF": str(self.config)}
        for name in ("state", "spool"):
            (folder / name).mkdir(parents=True)
        self._host = socket.gethostname().partition(".")[0]
        ports = {"controller_port": free_port(), "node_port": free_port()}
        self.config.write_text(CONFIG.format(folder=folder, host=self._host, **ports))
        (folder / "gres.conf").write_text(DEVICES.format(files="/dev/tty[1-4]"))  # any four devices
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        files = [f"--{name.replace('_', '-')}={folder}/munge.{name}" for name in ("socket", "pid_file", "log_file")]
        self._run("munged", "--force", f"--key-file={key}", f"--seed-file={folder}/munge.seed", *files)
        self.start_controller()
        self._run("slurmd", "-f", str(self.config))
        self._wait_for("idle")

    def stop_controller(self) -> None:
        """The controller is away, as while its machine is restarted."""
        _end(self.folder / "slurmctld.pid")

    def start_controller(self) -> None:
        """The controller is there, with what it knew."""
        self._run("slurmctld", "-f", str(self.config))

    def fill(self) -> None:
        """Nothing starts any more."""
        self._run("scontrol", "update", "partition=main", "state=down")

    def free(self) -> None:
        """What waits may start."""
        self._run("scontrol", "update", "partition=main", "state=up")

    def fail_node(self) -> None:
        """Lose the node with all that runs on it; another like it comes back."""
        self._run("scontrol", "update", f"nodename={self._host}", "state=down", "reason=test")
        self._run("scontrol", "update", f"nodename={self._host}", "state=resume")
        self._wait_for("idle")

    def close(self) -> None:
        """End the daemons."""
        for name in ("slurmd.pid", "slurmctld.pid", "munge.pid_file"):
            _end(self.folder / name)

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stderr}"
        return done.stdout

    def _wait_for(self, state: str) -> None:
        command: Sequence[str] = ("sinfo", "--noheader", "--format=%T")
        end = time.monotonic() + READY_S
        while (
            found := subprocess.run(command, env=self._environ, capture_output=True, text=True).stdout.strip()
        ) != state:
            log = (self.folder / "slurmctld.log").read_text()[-2000:]
            assert time.monotonic() < end, f"the node is {found!r}, not {state}\n{log}"
            time.sleep(0.2)


def _end(file: Path) -> None:
    pid = int(file.read_text())
    os.kill(pid, 15)
    while Path(f"/proc/{pid}").exists():
        time.sleep(0.05)
