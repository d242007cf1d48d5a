"""A cluster to hand jobs in to: the stand-in, and with `nox -s server-slurm` Slurm itself."""

import os
import time

import pytest

from tests.kit import slurm_stand_in
from tests.kit.slurm_cluster import SlurmCluster, missing


class StandIn:
    """The stand-in, with the handles of the real one."""

    def __init__(self, folder):
        self.folder, self.config = folder, slurm_stand_in.install(folder)

    def stop_controller(self):
        (self.folder / "away").touch()

    def start_controller(self):
        (self.folder / "away").unlink()

    def fill(self):
        (self.folder / "full").touch()

    def free(self):
        (self.folder / "full").unlink()

    def fail_node(self):
        slurm_stand_in.fail_node(self.folder)

    def close(self):
        for file in (self.folder / "jobs").iterdir():
            if (task := slurm_stand_in.read(file))["state"] in ("RUNNING", "PENDING"):
                slurm_stand_in.write(file, task | {"state": "CANCELLED"})
                slurm_stand_in.end(task.get("pid", 0) or 2**22, 0.0)


@pytest.fixture
def cluster(request, tmp_path, monkeypatch):
    """A cluster with four GPUs that this process can hand jobs in to; parametrized with "slurm" it is Slurm itself."""
    is_slurm = getattr(request, "param", "") == "slurm"
    if is_slurm and (reason := missing()):
        pytest.skip(reason)
    made = (SlurmCluster if is_slurm else StandIn)(tmp_path / "cluster")
    monkeypatch.setenv("SLURM_CONF", str(made.config))
    monkeypatch.setenv("PATH", f"{tmp_path / 'cluster'}{os.pathsep}{os.environ['PATH']}")
    yield made
    made.close()


@pytest.fixture
def wait_for():
    """`wait_for(lambda: ...)`: until it is true; the test's own time limit ends it."""

    def wait(is_so):
        while not is_so():
            time.sleep(0.02)

    return wait
