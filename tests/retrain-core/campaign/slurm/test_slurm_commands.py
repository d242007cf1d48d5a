"""What `sbatch` is asked for, and how the answers of Slurm are read."""

from __future__ import annotations

from pathlib import Path

from retrain.campaign.slurm_commands import TaskState
from retrain.campaign.slurm_launcher import Options


def test_a_run_gets_its_gpus_on_one_node() -> None:
    arguments = Options(time="2:00:00").arguments(2, Path("/w"), 60.5)
    assert {"--time=2:00:00", "--gres=gpu:2", "--nodes=1", "--ntasks=1", "--signal=B:TERM@61"} <= set(arguments)
    assert "--gres=gpu:a100:2" in Options(gres="gpu:a100:2").arguments(1, Path("/w"), 60.0)
    assert not any("gres" in each for each in Options().arguments(0, Path("/w"), 60.0))
    assert Options(sbatch=["--constraint=nvlink"]).arguments(0, Path("/w"), 60.0)[-1] == "--constraint=nvlink"


def test_every_end_has_a_code() -> None:
    def code(state: str, status: int = 0) -> int:
        return TaskState(job_id="1", state=state, status=status).code

    assert [code("COMPLETED"), code("FAILED", 75 << 8), code("FAILED", 9), code("FAILED")] == [0, 75, -9, 1]
    assert {code(state) for state in ("TIMEOUT", "PREEMPTED", "DEADLINE")} == {75}
    assert {code(state) for state in ("NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL")} == {-9}
    assert code("CANCELLED") == -15
