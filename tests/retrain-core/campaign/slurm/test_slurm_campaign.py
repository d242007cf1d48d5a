"""Whole campaigns of the toy policy on Slurm."""

from pathlib import Path

import pytest

from retrain.campaign.slurm_commands import TaskState
from retrain.campaign.slurm_launcher import RECORD, Options
from tests.end_to_end.campaigns import TUNED, check_same, check_same_search, kill_all, manifest, wait_for
from tests.kit.campaigns import conditions
from tests.kit.problems import codes_in

ONE = conditions("grpo+toy_index")
SEEDS = "seeds = [1, 2]\nmax_steps = 4\n"
FEW = "seeds = [1]\nmax_steps = 4\n"
EVAL = "[eval]\nexamples = 2\nevery = 2\n"
OFTEN = "launcher_options = { poll_s = 0.2 }\n"
SLURM = ("--campaign-launcher", "slurm", "--campaign-parallel", "true")


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["stand-in", pytest.param("slurm", marks=pytest.mark.server)], indirect=True)
def test_jobs_outlive_the_campaign_and_are_found_again(write, start, finish, cluster):
    write(SEEDS, ONE)
    assert finish("c.toml", "--log-dir", "here")[0] == 0
    write(SEEDS + OFTEN, ONE)
    cluster.fill()
    process = start("c.toml", "--log-dir", "there", *SLURM)
    records = [Path("there/runs") / f"grpo+toy_index_s{seed}" / RECORD for seed in (1, 2)]
    wait_for(lambda: all(file.exists() and '"job_id": ""' not in file.read_text() for file in records), process)
    kill_all(process, orphans_too=False)
    process = start("c.toml", "--log-dir", "there", *SLURM)
    for line in process.stdout:
        if "grpo+toy_index_s2 started (started by an earlier session, waiting for it)" in line:
            break
    cluster.free()
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, out + err
    content = manifest("there")
    assert (content["launcher"], content["status"]) == ("slurm", "done")
    assert [entry["attempts"] for entry in content["runs"]] == [1, 1]
    check_same("there", "here")


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["stand-in", pytest.param("slurm", marks=pytest.mark.server)], indirect=True)
def test_a_search_on_slurm_is_the_same_as_one_by_processes(write, start, finish, cluster):
    write(FEW + TUNED, ONE, EVAL)
    code, out, err = finish("c.toml", "--log-dir", "here")
    assert code == 0, out + err
    write(FEW + OFTEN + TUNED, ONE, EVAL)
    cluster.fill()
    process = start("c.toml", "--log-dir", "there", *SLURM)
    wait_for(lambda: len([*Path("there/tuning/runs").glob(f"*/{RECORD}")]) == 2, process)
    kill_all(process, orphans_too=False)
    cluster.free()
    code, out, err = finish("c.toml", "--log-dir", "there", *SLURM)
    assert code == 0, out + err
    assert [len([*Path(folder, "runs").glob(f"*/{RECORD}")]) for folder in ("there/tuning", "there")] == [2, 1]
    check_same_search("there", "here")


def test_a_machine_without_slurm_says_so(write, command, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    result = command(str(write(SEEDS, ONE)), *SLURM)
    assert (result.code, codes_in(result.err)) == (2, ["campaign.no-slurm"])
    assert not Path("out/runs").exists()


def test_a_run_gets_its_gpus_on_one_node():
    arguments = Options(time="2:00:00").arguments(2, Path("/w"), 60.5)
    assert {"--time=2:00:00", "--gres=gpu:2", "--nodes=1", "--ntasks=1", "--signal=B:TERM@61"} <= set(arguments)
    assert "--gres=gpu:a100:2" in Options(gres="gpu:a100:2").arguments(1, Path("/w"), 60.0)
    assert not any("gres" in each for each in Options().arguments(0, Path("/w"), 60.0))
    assert Options(sbatch=["--constraint=nvlink"]).arguments(0, Path("/w"), 60.0)[-1] == "--constraint=nvlink"


def test_every_end_has_a_code():
    def code(state, status=0):
        return TaskState(job_id="1", state=state, status=status).code

    assert [code("COMPLETED"), code("FAILED", 75 << 8), code("FAILED", 9), code("FAILED")] == [0, 75, -9, 1]
    assert {code(state) for state in ("TIMEOUT", "PREEMPTED", "DEADLINE")} == {75}
    assert {code(state) for state in ("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")} == {-9}
    assert code("CANCELLED") == -15
