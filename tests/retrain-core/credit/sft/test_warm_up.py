"""A run with `[sft]` on the toy policy: its lines, its checkpoints, resuming in the middle, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.credit.warm_up import SupervisedSteps
from retrain.kernel.errors import NonFiniteError, Problem
from tests.kit.overlapped import lines
from tests.kit.shared import first_or_long

Run = Callable[..., Any]
EVALS = ("--eval-examples", "2", "--eval-samples", "2", "--eval-every", "1")


@pytest.fixture
def run(command: Callable[..., Any], toy_arguments: list[str]) -> Run:
    """`run("--log-dir", "a")`: three supervised steps, then two others."""
    steps = ("--max-steps", "2", "--save-every", "1", "--sft-steps", "3", "--sft-batch-size", "3")
    base = [*toy_arguments, *steps, *EVALS]
    return lambda *arguments: command(*base, *arguments)


def untimed(folder: Path) -> list[dict[str, Any]]:
    return [{name: value for name, value in line.items() if not name.endswith("time_s")} for line in lines(folder)]


def test_supervised_steps_come_first_and_their_lines_say_so(run: Run, tmp_path: Path) -> None:
    done = run("--log-dir", "a", "--sft-lr", "0.5")
    assert done.code == 0, done.err
    found = lines(tmp_path / "a")
    assert [line["step"] for line in found] == [-4, -3, -2, -1, 0, 1]
    assert [line.get("phase") for line in found] == ["sft"] * 3 + [None] * 3
    assert all("eval_correct_rate" not in line for line in found[:3]), "evaluated when they are over"
    assert found[0]["sft_loss"] == 0.0  # what the toy reports
    assert found[0]["sft_tokens"] == 6  # a digit and its end, three times
    assert found[0]["sft_lr"] == 0.5
    assert "loss" not in found[0]
    assert "SFT, 2 steps left | loss=" in done.err + done.out
    names = {path.name for path in (tmp_path / "a" / "adapter").iterdir()}
    assert names == {*(f"checkpoint_step_{step}" for step in (-3, -2, 0, 1)), "final"}
    assert found[4]["step"] == 0
    assert json.loads((tmp_path / "a" / "run.json").read_text())["status"] == "done"


@pytest.mark.long
@pytest.mark.parametrize("step", first_or_long([-4, -2]))
def test_a_run_that_breaks_off_in_between_resumes_to_the_same_bytes(
    step: int, run: Run, command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run("--log-dir", "whole").code == 0
    take = SupervisedSteps.take

    def broken(self: SupervisedSteps, number: int, train: Any) -> Any:
        if number == step:
            raise RuntimeError("power failure")
        return take(self, number, train)

    with monkeypatch.context() as patched:
        patched.setattr(SupervisedSteps, "take", broken)
        with pytest.raises(RuntimeError):
            run("--log-dir", "cut")
    assert [line["step"] for line in lines(tmp_path / "cut")] == [*range(-4, step)]
    done = command("--resume", "cut")
    assert done.code == 0, done.err
    assert untimed(tmp_path / "cut") == untimed(tmp_path / "whole")
    policies = [(tmp_path / name / "adapter" / "final" / "logits.json").read_bytes() for name in ("cut", "whole")]
    assert policies[0] == policies[1]


def test_a_step_that_is_not_finite_is_rejected_and_three_in_a_row_end_the_run(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = SupervisedSteps.take

    def refuse(batch: Any) -> Any:
        raise NonFiniteError(Problem(what="the loss is nan", fix="lower lr"))

    monkeypatch.setattr(SupervisedSteps, "take", lambda self, step, train: take(self, step, refuse))
    done = run("--log-dir", "a")
    assert done.code == 1
    assert [line["rejected"] for line in lines(tmp_path / "a")] == ["the loss is nan"] * 3
    assert {line["sft_loss"] for line in lines(tmp_path / "a")} == {None}


def test_a_source_of_its_own_gives_no_held_out_example(run: Run, tmp_path: Path) -> None:
    done = run("--log-dir", "a", "--sft-source", "toy")
    assert done.code == 0, done.err
    assert "[sft] 2 examples left out: they are held out" in done.err + done.out
    assert untimed(tmp_path / "a")[:1][0]["sft_left_out"] == 0
