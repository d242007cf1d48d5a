"""Whole campaigns of the toy policy, each run in its own process."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from retrain.campaign.planned import progress
from retrain.records.files import RunLock
from tests.end_to_end.campaigns import check_same, kill_all, manifest, wait_for
from tests.kit.campaigns import conditions
from tests.kit.problems import codes_in

Finish = Callable[..., tuple[int, str, str]]
Start = Callable[..., subprocess.Popen[str]]
Write = Callable[..., Path]
SEEDS = "seeds = [7]\nmax_steps = 4\n"
ONE = conditions("grpo+toy_index")
NAMES = ["toy_raw+toy_flat_s7", "grpo+toy_index_s7"]


@pytest.mark.long
def test_sequential_then_complete_then_parallel_is_the_same(write: Write, finish: Finish) -> None:
    write(SEEDS)
    code, out, err = finish("c.toml", "--log-dir", "one")
    assert (code, err) == (0, ""), out
    lines = out.splitlines()
    assert lines[:5] == [
        "Campaign: 2 conditions x 1 seeds = 2 runs (sequential)",
        "  conditions: toy_raw+toy_flat, grpo+toy_index",
        "  seeds: 7",
        "  max_steps: 4",
        "  output: one",
    ]
    assert [line for line in lines if line[0] == "["] == [f"[{i}/2] {name}" for i, name in enumerate(NAMES, start=1)]
    assert lines.count("  OK") == 2
    content = manifest("one")
    wanted = {"status": "done", "num_runs": 2, "parallel": False, "runner_pid": None}
    assert {name: content[name] for name in wanted} == wanted
    assert {(run["status"], run["returncode"], run["attempts"]) for run in content["runs"]} == {("done", 0, 1)}
    for name in NAMES:
        assert {"run.json", "config.toml", "metrics.jsonl", "adapter", "stdout.log", "stderr.log"} <= {
            entry.name for entry in (Path("one/runs") / name).iterdir()
        }
    done = "Already complete: all 2 runs are done in one. `--new` starts another campaign.\n"
    assert finish("c.toml", "--log-dir", "one")[:2] == (0, done)
    code, out, err = finish("c.toml", "--log-dir", "two", "--campaign-parallel", "true", "--campaign-max-workers", "2")
    assert (code, err) == (0, ""), out
    assert "(parallel)" in out
    assert "  workers: 2" in out
    check_same("two", "one")


@pytest.mark.long
def test_one_broken_condition_is_recorded_and_ends_no_other(write: Write, finish: Finish) -> None:
    broken = conditions("toy_raw+toy_index") + 'reward_type = "toy_broken"\n'
    write("seeds = [1]\nmax_steps = 2\nretries = 1", ONE + broken)
    code, out, err = finish("c.toml")
    assert (code, codes_in(err)) == (1, ["campaign.failed-runs"])
    assert "Campaign failed: 1 of 2 runs done, 1 failed" in out
    good, bad = manifest()["runs"]
    assert (good["status"], bad["status"], bad["attempts"]) == ("done", "failed", 2)
    assert "reward 'toy_broken' failed on all " in bad["error"]
    code, out, _ = finish("c.toml", "--campaign-retries", "0")  # again: only the missing run
    assert (code, "[1/2]" in out) == (1, False)
    assert manifest()["runs"][1]["attempts"] == 3


@pytest.mark.long
def test_a_stop_saves_and_the_same_command_finishes(write: Write, start: Start, finish: Finish) -> None:
    write("seeds = [1]\nmax_steps = 40\n", ONE)
    process = start("c.toml")
    run = Path("out/runs/grpo+toy_index_s1")
    wait_for(lambda: progress(run).steps_done > 2, process)
    process.terminate()
    out, err = process.communicate(timeout=100)
    assert process.returncode == 75, out + err
    assert "Stopping (SIGTERM)" in out
    assert (manifest()["status"], manifest()["runs"][0]["status"]) == ("stopped", "stopped")
    assert 2 < progress(run).steps_done < 40
    code, out, err = finish("--resume", "out")  # by folder alone
    assert (code, err) == (0, ""), out
    assert "(continued)" in out
    assert progress(run).steps_done == 40
    code, _, err = finish("c.toml", "--resume", "out", "--lr", "0.5")
    assert code == 2
    assert "training.lr was 4e-05 and is now 0.5" in err


@pytest.mark.slow
def test_runs_of_a_killed_runner_are_not_doubled(write: Write, start: Start) -> None:
    write("seeds = [1]\nmax_steps = 60\n", ONE)
    run = Path("out/runs/grpo+toy_index_s1")
    process = start("c.toml")
    wait_for(lambda: progress(run).steps_done > 2, process)
    kill_all(process)
    assert manifest()["status"] == "running"  # nobody was left to write it down
    orphan = RunLock(run)  # what remains of one
    process = start("c.toml")
    lines = iter(process.stdout or ())
    assert any(f"[1/1] {run.name} (still alive, waiting for it)" in line for line in lines)
    orphan.release()
    rest = "".join(lines)
    process.communicate(timeout=100)
    assert process.returncode == 0
    assert f"[1/1] {run.name} (continued)" in rest
    assert progress(run).steps_done == 60
    assert not run.with_name(f"{run.name}.1").exists()


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.timeout(1800)
def test_killed_at_random_instants_it_ends_as_if_it_never_was(write: Write, start: Start, finish: Finish) -> None:
    write("seeds = [1, 2]\nmax_steps = 30\n")
    assert finish("c.toml", "--log-dir", "whole")[0] == 0
    parallel = ("--campaign-parallel", "true", "--campaign-max-workers", "2")
    chance = random.Random(7)
    for number, kills in enumerate((5, 5)):  # ten in all
        arguments = ("c.toml", "--log-dir", f"killed{number}", *(parallel if number % 2 else ()))
        for _ in range(kills):
            process = start(*arguments)
            with suppress(subprocess.TimeoutExpired):
                process.wait(chance.uniform(0.5, 12.0))
            kill_all(process, orphans_too=chance.random() < 0.7)
        code, out, err = finish(*arguments)
        assert code == 0, out + err
        check_same(f"killed{number}", "whole")
