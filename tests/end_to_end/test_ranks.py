"""Several ranks end as one run does: a lost rank, a signal, the death of rank 0; and the run goes on afterwards."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.end_to_end.killing import BASE, check_nothing_is_half_written, finish, start, waiting
from tests.end_to_end.running import is_running, records, retrain, tiny
from tests.kit.waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
STEP = 2
OPTIONS = '\n[backend.options]\nparallel = "{}"\n'
FULL = ("--lora-rank", "0", "--lr", "1e-3")
# In the step: the run says which processes it has, and gives whoever waits for that the time to act.
WAIT_IN_STEP = """
from retrain_local.training.trainer import Trainer
def wait(*_):
    Path({mark!r}).touch()
    time.sleep(1.0)
at(Trainer, "accumulate", wait, lambda _, batch: batch.step == {step})
"""


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(maxsplit=2) for line in listed.splitlines()[1:]]
    return [int(pid) for pid, parent, command in rows if int(parent) == process.pid and "ranks.worker" in command]


def check_gone(pids: list[int]) -> None:
    wait_until(lambda: not any(map(is_running, pids)))


def configured(folder: Path, parallel: str) -> None:
    assert retrain("init", "--template", "tiny", cwd=folder).code == 0
    with (folder / "retrain.toml").open("a") as file:
        file.write(OPTIONS.format(parallel))


def in_a_step(folder: Path, *arguments: str, devices: str = "cpu,cpu") -> tuple[subprocess.Popen[str], list[int]]:
    patch, more = WAIT_IN_STEP.replace("{step}", str(STEP)), ("--devices", devices, "--log-dir", "run")
    process = waiting(*BASE, *more, *arguments, cwd=folder, patch=patch, mark=folder / "mark")
    return process, ranks_of(process)


def more_of(parallel: str) -> tuple[str, ...]:
    return FULL if parallel == "fsdp" else ()


@pytest.mark.parametrize("parallel", ["replicate", pytest.param("fsdp", marks=pytest.mark.long)])
def test_a_killed_rank_ends_the_run_with_its_name_and_the_run_goes_on(parallel: str, tmp_path: Path) -> None:
    configured(tmp_path, parallel)
    process, ranks = in_a_step(tmp_path, *more_of(parallel), devices="cpu,cpu,cpu")
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    code, _, err = finish(process)
    assert code == 1, err
    assert f"rank 1 (process {ranks[0]}) was killed by signal 9" in err
    assert "--resume" in err
    check_gone(ranks)
    check_nothing_is_half_written(tmp_path / "run")
    code, out, err = finish(start("--resume", "run", "--devices", "cpu", cwd=tmp_path))
    assert code == 0, err
    assert "This checkpoint is of 3 ranks, and the run continues on 1" in out + err
    assert [line["step"] for line in records(tmp_path / "run/metrics.jsonl") if "loss" in line] == list(range(6))


@pytest.mark.long
@pytest.mark.parametrize("parallel", ["replicate", "fsdp"])
def test_a_signal_is_for_rank_0_and_the_others_follow(parallel: str, tmp_path: Path) -> None:
    configured(tmp_path, parallel)
    process, ranks = in_a_step(tmp_path, *more_of(parallel), "--save-every", "0")
    for pid in ranks:  # as when a scheduler signals the whole group
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    code, _, err = finish(process)
    assert code == 75, err
    check_gone(ranks)
    (checkpoint,) = (tmp_path / "run/adapter").glob("checkpoint_step_*")
    assert json.loads((checkpoint / "checkpoint.json").read_text())["next_step"] == STEP
    code, _, err = finish(start("--resume", "run", cwd=tmp_path))
    assert code == 0, err


@pytest.mark.long
def test_the_death_of_rank_0_leaves_no_orphans(tmp_path: Path) -> None:
    configured(tmp_path, "replicate")
    process, ranks = in_a_step(tmp_path)
    process.kill()
    finish(process)
    check_gone(ranks)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("parallel", ["replicate", "fsdp"])
def test_ranks_learn_what_one_process_learns(parallel: str, tmp_path: Path) -> None:
    """The template's own run: the held-out rate ends within the interval of one process."""
    rates, intervals = {}, {}
    for name, devices in (("one", "cpu"), ("two", "cpu,cpu")):
        folder = tmp_path / name
        folder.mkdir()
        configured(folder, parallel if name == "two" else "split")
        tiny("--seed", "1", "--devices", devices, *more_of(parallel), cwd=folder)
        last = [line for line in records(folder / "logs/tiny/metrics.jsonl") if "eval_correct_rate" in line][-1]
        rates[name], intervals[name] = last["eval_correct_rate"], (last["eval_ci_low"], last["eval_ci_high"])
    assert intervals["one"][0] <= rates["two"] <= intervals["one"][1]
    assert rates["two"] >= 0.8  # 0.47 before
