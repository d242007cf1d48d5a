"""Back pressure on a real model: the batch size moves, the records say why, and a killed run goes on where it was."""

from __future__ import annotations

from pathlib import Path

import pytest

from retrain.records.checkpoints import newest_valid
from tests.end_to_end.killing import finish, start, wait_for
from tests.end_to_end.running import records, retrain

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

SWEEP = [1, 2, 4, 8, 16, 1]
STEPS = 12
RUN = ("--bp-enabled", "--bp-warmup-steps", "6", "--bp-max-batch-size", "16", "--max-steps", str(STEPS))
SIZE = ("--batch-size", "3", "--group-size", "8", "--max-tokens", "24", "--save-every", "1", "--eval-examples", "0")


@pytest.mark.long
def test_a_killed_run_goes_on_with_what_it_had_measured(tmp_path: Path) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    run = tmp_path / "run"
    process = start(*RUN, *SIZE, "--log-dir", str(run), cwd=tmp_path)
    wait_for(process, run / "adapter/checkpoint_step_8")
    process.kill()
    finish(process)
    before, _ = newest_valid(run / "adapter")
    assert before is not None
    state = before.state["pacer"]
    assert state["steps"] == before.next_step >= 8

    code, _, err = finish(start("--resume", str(run), cwd=tmp_path))
    assert code == 0, err
    lines = records(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert [line["batch_size"] for line in lines[:6]] == SWEEP
    assert lines[before.next_step]["batch_size"] == state["batch_size"]
    for line in lines:
        assert line["bp_warmup"] == (line["step"] < 6)
        assert line["bp_action"] in {"hold", "throttle", "increase"}
        assert line["bp_regime"] in {"warmup", "unknown", "retrograde", "optimal", "underused"}
        assert 1 <= line["batch_size"] <= 16
        assert line.get("bp_sigma", 0.0) >= 0.0
    assert "bp_throughput" in lines[-1]

    after, _ = newest_valid(run / "adapter")
    assert after is not None
    assert after.state["pacer"]["samples"][: len(state["samples"])] == state["samples"]
    assert after.state["pacer"]["steps"] == STEPS
