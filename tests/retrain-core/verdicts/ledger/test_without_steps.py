"""`retrain compare --ledger` of runs that did no step, and of a ledger without an event."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.errors import StopRequested
from retrain.verdicts.ledger.chain import append

Command = Callable[..., Any]


def stepless(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    manifest = {"condition": "a+b", "seed": seed, "started": f"2026-03-01T12:00:0{seed}+00:00", "status": "stopped"}
    (folder / "run.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").touch()
    return folder


def test_runs_that_ended_before_their_first_step_are_counted(
    command: Command, recorded: Callable[..., Path], tmp_path: Path
) -> None:
    for seed in (1, 2):  # their empty metrics are equal, and no copies of each other
        recorded(stepless(tmp_path / f"logs/r{seed}", seed), StopRequested("SIGTERM"))
    done = command("compare", "--ledger")
    assert done.code == 0, done.out
    assert "intact" in done.out
    assert "2 runs, 2 of them ended without a step" in done.out
    (tmp_path / "logs/r1/metrics.jsonl").write_text('{"step": 0}\n')
    done = command("compare", "--ledger")
    assert done.code == 1
    assert "r1: changed since the run ended: metrics.jsonl" in done.out


def test_a_run_that_was_killed_is_unknown_and_not_intact_without_a_word(command: Command, tmp_path: Path) -> None:
    run = stepless(tmp_path / "logs/r1", 1)
    manifest = json.loads((run / "run.json").read_text())
    facts = {"started": manifest["started"], "condition": "a+b", "seed": 1, "first_step": 0, "resumed": False}
    append(run.parent, "run_started", run="r1", **facts, hashes={})
    done = command("compare", "--ledger", "--json")
    assert done.code == 0, done.out
    (found,) = json.loads(done.out)["findings"]
    assert not found["certain"]
    assert "no end of r1 is on record" in found["what"]


@pytest.mark.parametrize("what", [(), ("--events",)])
def test_a_ledger_without_an_event_is_refused(command: Command, tmp_path: Path, what: tuple[str, ...]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/ledger.jsonl").touch()
    done = command("compare", "--ledger", *what)
    assert done.code == 2
    assert "logs/ledger.jsonl: holds no event" in done.err
