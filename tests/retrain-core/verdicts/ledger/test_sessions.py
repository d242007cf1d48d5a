"""A run tells the ledger that it began and how it ended; `retrain compare --ledger` of runs that did no step."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.errors import StopRequested
from retrain.verdicts.ledger.chain import NAME, append
from retrain.verdicts.ledger.disk import read_run
from retrain.verdicts.ledger.history import read_history
from tests.kit.ledgers import recorded
from tests.kit.problems import codes_in

Command = Callable[..., Any]


def stepless(folder: Path, seed: int) -> Path:
    folder.mkdir(parents=True)
    manifest = {"condition": "a+b", "seed": seed, "started": f"2026-03-01T12:00:0{seed}+00:00", "status": "stopped"}
    (folder / "run.json").write_text(json.dumps(manifest))
    (folder / "metrics.jsonl").touch()
    return folder


def test_a_run_and_its_continuation_are_one_with_the_hashes_of_its_records(
    command: Command, toy_arguments: list[str], tmp_path: Path
) -> None:
    logs = tmp_path / "logs"
    assert command(*toy_arguments, "--max-steps", "1", "--log-dir", "logs/a").code == 0
    assert command("--resume", "logs/a", "--max-steps", "2").code == 0
    history = read_history(logs)
    (run,) = history.runs.values()
    assert (run.name, run.state, run.first["resumed"], history.num_lines) == ("a", "done", False, 4)
    assert run.ended
    assert run.ended["steps"] == 2
    assert dict(run.hashes) == read_run(logs, logs / "a").hashes
    assert {"metrics.jsonl", "settings", "inputs"} <= run.hashes.keys()
    assert command("compare", "--ledger").code == 0


def test_a_run_continues_without_a_ledger_and_says_so_once(
    command: Command, toy_arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "logs" / NAME).mkdir(parents=True)
    result = command(*toy_arguments, "--max-steps", "1", "--log-dir", "logs/a")
    assert (result.code, (result.out + result.err).count("Not in the ledger")) == (0, 1)


def test_runs_that_ended_before_their_first_step_are_counted_and_no_copies(command: Command, tmp_path: Path) -> None:
    for seed, error in ((1, StopRequested("SIGTERM")), (2, StopRequested("SIGTERM"))):
        recorded(stepless(tmp_path / f"logs/r{seed}", seed), error)
    done = command("compare", "--ledger")
    assert done.code == 0, done.out
    assert "2 runs, 2 of them ended without a step" in done.out
    (tmp_path / "logs/r1/metrics.jsonl").write_text('{"step": 0}\n')
    done = command("compare", "--ledger")
    assert (done.code, "r1: changed since the run ended: metrics.jsonl" in done.out) == (1, True)


def test_a_run_that_was_killed_is_unknown_and_not_silently_intact(command: Command, tmp_path: Path) -> None:
    run = stepless(tmp_path / "logs/r1", 1)
    facts = {"started": json.loads((run / "run.json").read_text())["started"], "condition": "a+b", "seed": 1}
    append(run.parent, "run_started", run="r1", **facts, first_step=0, resumed=False, hashes={})
    done = command("compare", "--ledger", "--json")
    (found,) = json.loads(done.out)["findings"]
    assert (done.code, found["certain"], "no end of r1 is on record" in found["what"]) == (0, False, True)


@pytest.mark.parametrize("what", [(), ("--events",)])
def test_a_ledger_without_an_event_is_refused(command: Command, tmp_path: Path, what: tuple[str, ...]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs/ledger.jsonl").touch()
    done = command("compare", "--ledger", *what)
    assert (done.code, codes_in(done.err)) == (2, ["ledger.empty"])
