"""Whole campaigns of the toy policy, each run in its own process."""

from pathlib import Path

import pytest

from retrain.campaign.planned import progress
from tests.end_to_end.campaigns import check_same, manifest, wait_for
from tests.kit.campaigns import conditions

SEEDS = "seeds = [7]\nmax_steps = 4\n"
ONE = conditions("grpo+toy_index")
NAMES = ["toy_raw+toy_flat_s7", "grpo+toy_index_s7"]


@pytest.mark.long
def test_sequential_then_complete_then_parallel_is_the_same(write, finish):
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
def test_a_stop_saves_and_the_same_command_finishes(write, start, finish):
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
