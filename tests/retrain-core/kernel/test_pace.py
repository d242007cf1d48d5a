"""The interface of loop and pacer: off, it changes nothing; on, it sets the batch size, backs off, and resumes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.overlapped import lines
from tests.kit.problems import codes_in

PACER = """
class Pacer:
    def __init__(self, context):
        self.size, self.seen = 1, []

    def batch_size(self, step):
        return self.size

    def observe(self, view):
        self.seen.append([view.step, view.batch_size, view.out_of_memory, view.sampled_tokens, view.has_trained])
        self.size = view.batch_size - 1 if view.out_of_memory else view.batch_size + 1

    def metrics(self):
        return {"bp_action": "increase", "bp_seen": len(self.seen)}

    def state(self):
        return {"size": self.size, "seen": self.seen}

    def restore(self, state):
        self.size, self.seen = state["size"], state["seen"]


class Greedy(Pacer):
    def observe(self, view):
        self.size = 5


class Idle(Pacer):
    def batch_size(self, step):
        return 0
"""
BACKEND = """
from toy_parts import ToyBackend, Options
from retrain.api import OutOfMemoryError
from dataclasses import replace

class Small(ToyBackend):
    def __init__(self, context):
        super().__init__(replace(context, params=Options()))

    def sample(self, requests, params):
        if len(requests) > 3:
            raise OutOfMemoryError(f"{len(requests)} prompts do not fit")
        return super().sample(requests, params)
"""
Run = Callable[..., Any]


@pytest.fixture
def run(command: Callable[..., Any], toy_arguments: list[str], tmp_path: Path) -> Run:
    (tmp_path / "pacers.py").write_text(PACER)
    (tmp_path / "small_backend.py").write_text(BACKEND)
    base = [*toy_arguments, "--max-steps", "4", "--save-every", "2"]
    return lambda *arguments: command(*base, *arguments)


def seen(tmp_path: Path) -> list[list[Any]]:
    """Rows of the pacer's state in the last checkpoint."""
    content = json.loads((tmp_path / "logs/train/adapter/final/checkpoint.json").read_text())
    found: list[list[Any]] = content.get("state", content)["pacer"]["seen"]
    return found


def on(name: str) -> tuple[str, ...]:
    return ("--bp-enabled", "--bp-pacer", f"pacers.{name}")


def test_the_pacer_sees_every_step_and_a_step_that_does_not_fit_is_tried_again(run: Run, tmp_path: Path) -> None:
    result = run(*on("Pacer"), "--backend", "small_backend.Small")
    assert result.code == 0, result.err
    steps, rows = lines(tmp_path / "logs/train"), seen(tmp_path)
    assert [line["step"] for line in steps] == [0, 1, 2, 3]
    assert [line["batch_size"] for line in steps] == [1, 2, 3, 3]
    assert [line["bp_seen"] for line in steps] == [1, 2, 3, 5]
    tried_again = [[3, 4, True], [3, 3, False]]
    assert [row[:3] for row in rows] == [[0, 1, False], [1, 2, False], [2, 3, False], *tried_again]
    done = [row for row in rows if not row[2]]
    assert [row[3] for row in done] == [line["sampled_tokens"] for line in steps]
    assert [row[4] for row in done] == [line["num_datums"] > 0 for line in steps]
    assert json.loads((tmp_path / "logs/train/trainer_state.json").read_text())["current_batch_size"] == 4
    assert "the same seed does not give the same run" in result.out + result.err


@pytest.mark.long
def test_a_resumed_run_continues_with_the_pacers_state(run: Run, tmp_path: Path) -> None:
    assert run(*on("Pacer"), "--max-steps", "2").code == 0
    result = run(*on("Pacer"), "--resume", "logs/train")
    assert result.code == 0, result.err
    assert [line["batch_size"] for line in lines(tmp_path / "logs/train")] == [1, 2, 3, 4]
    assert [row[0] for row in seen(tmp_path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("pacer", [(), on("Greedy")], ids=["none", "one that does not back off"])
def test_without_anything_smaller_to_try_the_run_ends_with_the_error(
    pacer: tuple[str, ...], run: Run, tmp_path: Path
) -> None:
    result = run(*pacer, "--backend", "small_backend.Small", "--batch-size", "4")
    assert result.code == 1
    assert "prompts do not fit" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("pacer", "code"), [("pacers.Idle", "plugin.bad-batch-size"), ("usk", "plugin.missing")])
def test_a_pacer_that_wants_nothing_or_does_not_exist_is_refused(run: Run, pacer: str, code: str) -> None:
    result = run("--bp-enabled", "--bp-pacer", pacer)
    assert (result.code, codes_in(result.err)) == (2, [code])
