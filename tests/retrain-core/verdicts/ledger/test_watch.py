"""A run tells the ledger that it began and how it ended, and goes on where it cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from retrain.verdicts.ledger.chain import NAME
from retrain.verdicts.ledger.disk import read_run
from retrain.verdicts.ledger.history import read_history
from retrain.verdicts.wording.command import command as compare_command
from tests.kit.invoke import invoke

Command = Callable[..., Any]


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
    assert invoke(compare_command, ["--ledger"]).exit_code == 0


def test_a_run_goes_on_without_a_ledger_and_says_so_once(
    command: Command, toy_arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "logs" / NAME).mkdir(parents=True)
    result = command(*toy_arguments, "--max-steps", "1", "--log-dir", "logs/a")
    assert result.code == 0
    assert (result.out + result.err).count("Not in the ledger") == 1
