"""Launcher `ray`, on a local cluster that has the resources of two nodes; starting one takes half a minute."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from retrain.rooms.campaign.outcome import progress
from retrain.rooms.session.records.lock import owner_of
from tests.end_to_end.campaigns import check_same, manifest, wait_for

pytest.importorskip("ray")

Finish = Callable[..., tuple[int, str, str]]
Start = Callable[..., subprocess.Popen[str]]
ONE = '[[campaign.conditions]]\nadvantage_mode = "grpo"\ntransform_mode = "toy_index"\n'
RAY = ("--campaign-launcher", "ray", "--campaign-parallel", "true")
SEEDS = "seeds = [1, 2]\nmax_steps = 30\nretries = 2\n"


@pytest.fixture
def cluster(write: Callable[..., Path]) -> Iterator[str]:
    """The address of a cluster of two nodes with one core each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    yield made.address
    made.shutdown()


def parent_of(pid: int) -> int:
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(status[1])


@pytest.mark.long
def test_ray_is_the_same_as_processes_even_with_a_worker_killed(
    write: Callable[..., Path], start: Start, finish: Finish, cluster: str
) -> None:
    write(SEEDS, ONE)
    assert finish("c.toml", "--log-dir", "here")[0] == 0
    process = start("c.toml", "--log-dir", "there", *RAY, RAY_ADDRESS=cluster)
    run = Path("there/runs/grpo+toy_index_s1")
    wait_for(lambda: progress(run).steps_done > 2, process)
    with suppress(ProcessLookupError):
        os.kill(parent_of(owner_of(run)), signal.SIGKILL)  # the worker that watches over the run
    out, err = process.communicate(timeout=250)
    assert process.returncode == 0, out + err
    content = manifest("there")
    assert (content["launcher"], content["status"]) == ("ray", "done")
    assert [run["status"] for run in content["runs"]] == ["done", "done"]
    assert content["runs"][0]["attempts"] == 2
    check_same("there", "here")


@pytest.mark.long
def test_a_stop_reaches_the_runs_of_the_cluster(
    write: Callable[..., Path], start: Start, finish: Finish, cluster: str
) -> None:
    write("seeds = [1, 2, 3]\nmax_steps = 5000\n", ONE)
    process = start("c.toml", *RAY, RAY_ADDRESS=cluster)
    run = Path("out/runs/grpo+toy_index_s1")
    wait_for(lambda: progress(run).steps_done > 2, process)
    process.terminate()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 75, out + err
    assert not owner_of(run)
    assert {entry["status"] for entry in manifest()["runs"]} == {"stopped"}


def test_no_cluster_is_told(write: Callable[..., Path], finish: Finish) -> None:
    write(SEEDS, ONE)
    code, _, err = finish("c.toml", *RAY, RAY_ADDRESS="127.0.0.1:1")
    assert code == 2
    assert "no Ray cluster at '127.0.0.1:1'" in err
