"""Launcher `ray`, on a local cluster that has the resources of two nodes; starting one takes half a minute."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from retrain.campaign.planned import progress
from retrain.records.files import owner_of
from tests.end_to_end.campaigns import TUNED, check_same, check_same_search, kill_all, manifest, wait_for
from tests.kit.campaigns import conditions
from tests.kit.problems import codes_in

pytest.importorskip("ray")

ONE = conditions("grpo+toy_index")
FEW = "seeds = [1]\nmax_steps = 8\nretries = 2\n"
EVAL = "[eval]\nexamples = 2\nevery = 4\n"
RAY = ("--campaign-launcher", "ray", "--campaign-parallel", "true")
SEEDS = "seeds = [1, 2]\nmax_steps = 30\nretries = 2\n"
PLACED = Path(__file__).parents[3] / "tests/kit/ray_placement.py"


@pytest.fixture
def cluster(write):
    """The address of a cluster of two nodes with one core each."""
    from ray.cluster_utils import Cluster

    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    made.add_node(num_cpus=1)
    yield made.address
    made.shutdown()


def parent_of(pid):
    status = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(status[1])


@pytest.mark.long
def test_ray_is_the_same_as_processes_even_with_a_worker_killed(write, start, finish, cluster):
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
def test_a_search_on_ray_is_the_same_as_one_by_processes(write, start, finish, cluster):
    write(FEW + TUNED, ONE, EVAL)
    code, out, err = finish("c.toml", "--log-dir", "here")
    assert code == 0, out + err
    process = start("c.toml", "--log-dir", "there", *RAY, RAY_ADDRESS=cluster)
    wait_for(lambda: any(Path("there/tuning/runs").glob("*/metrics.jsonl")), process)
    kill_all(process)
    code, out, err = finish("c.toml", "--log-dir", "there", *RAY, RAY_ADDRESS=cluster)
    assert code == 0, out + err
    assert manifest("there")["launcher"] == "ray"
    check_same_search("there", "here")


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="only root gives a node a view of its own")
def test_gpus_of_a_run_are_on_one_node_and_a_node_without_the_folder_is_named(tmp_path):
    """In a process of its own: Ray connects a process once."""
    done = subprocess.run([sys.executable, str(PLACED)], cwd=tmp_path, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["codes"] == [0, 0]
    assert [gpus for gpus, _ in found["said"]] == ["0,1", "0,1"]  # of two nodes, which count from 0 each
    assert "do not see folders of the campaign" in found["refusal"]
    assert str(tmp_path) in found["refusal"]
    assert found["told"] == ["No node of the cluster has 1 cores and 8 GPUs: runs wait until one joins"]


def test_no_cluster_is_told(write, command, monkeypatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    result = command(str(write(SEEDS, ONE)), *RAY)
    assert (result.code, codes_in(result.err)) == (2, ["campaign.no-ray-cluster"])
