"""A third-party plugin can do with hooks alone what our own watchers do, and we implement every hook ourselves."""

from __future__ import annotations

import ast
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel import hooks

ROOT = Path(__file__).parents[3]
KEEPER = '''
from retrain.api import ConfigError, Problem, RetrainError, Watcher, hookimpl

DIARY = []
SAMPLED = []  # how far sampling had come when scoring began
SCORED = []  # and scoring by the end of each step


class Keeper(Watcher):
    """Records like a recorder, keeps state like a savepoint, judges and ends the run like a health monitor."""

    def __init__(self, context):
        self.limit = 3 if context.config.training.max_steps == 6 else 99
        self.seen = 0
        self.sampling = context.sampling_progress

    @hookimpl
    def retrain_load_state(self, state):
        self.seen = state["keeper"]["seen"]
        DIARY.append(f"load {self.seen}")

    @hookimpl
    def retrain_run_start(self, run):
        DIARY.append(f"start {run.manifest['seed']}")

    def step_line(self, metrics):
        self.seen += 1
        return {"keeper_seen": self.seen}

    def progress(self):
        return self.sampling.unit, self.sampling.done, self.sampling.total, self.sampling.limit

    def phase(self, step, phase):
        if phase == "scoring":
            SAMPLED.append(self.progress())

    @hookimpl
    def retrain_step_end(self, metrics):
        DIARY.append(f"line {metrics['step']} {metrics.get('keeper_seen')}")
        SCORED.append(self.progress())
        if self.seen == self.limit:
            return RetrainError(Problem(what="the keeper has seen enough"))

    @hookimpl
    def retrain_save_state(self, name, folder):
        if folder is None:
            return {"keeper": {"seen": self.seen}}
        DIARY.append(f"saved {name} {(folder / 'checkpoint.json').is_file()}")

    @hookimpl
    def retrain_run_end(self, error):
        DIARY.append(f"end {type(error).__name__}")


@hookimpl
def retrain_watch_run(context):
    return Keeper(context)
'''
HOOKS = [name for name, value in vars(hooks).items() if name.startswith("retrain_") and inspect.isfunction(value)]


@pytest.fixture
def run(command: Callable[..., Any], toy_arguments: list[str]) -> Callable[..., Any]:
    """A short run of the toys."""
    return lambda *arguments: command(*toy_arguments, "--eval-examples", "2", "--save-every", "2", *arguments)


def test_a_plugin_records_keeps_state_and_ends_a_run_with_hooks_alone(
    run: Callable[..., Any], distribution: Callable[..., Path], tmp_path: Path
) -> None:
    distribution("retrain-keeper", {"keeper": KEEPER})
    result = run("--max-steps", "6", "--log-dir", "kept")
    import keeper  # made by the fixture

    assert result.code == 1
    assert "the keeper has seen enough" in result.err
    before = ["start 1", "line -1 None", "line 0 1", "line 1 2", "saved checkpoint_step_2 True"]
    assert keeper.SAMPLED == [("completions", 8, 8, 3)] * 3
    assert [unit for unit, *_ in keeper.SCORED] == ["scores"] * 4
    assert [*before, "line 2 3", "saved checkpoint_step_3 True", "end RetrainError"] == keeper.DIARY
    lines = [json.loads(line) for line in (tmp_path / "kept/metrics.jsonl").read_text().splitlines()]
    assert [line.get("keeper_seen") for line in lines] == [None, 1, 2, 3]

    keeper.DIARY.clear()
    resumed = run("--max-steps", "5", "--resume", "kept")
    assert (resumed.code, resumed.err) == (0, "")
    assert [
        *("load 3", "start 1", "line 3 4", "saved checkpoint_step_4 True", "line 4 5"),
        *("saved final True", "end NoneType"),
    ] == keeper.DIARY


def test_a_watcher_that_cannot_be_built_is_named_before_the_model_loads(
    run: Callable[..., Any], distribution: Callable[..., Path], tmp_path: Path
) -> None:
    source = (
        "from retrain.api import hookimpl\n@hookimpl\ndef retrain_watch_run(context):\n    raise ValueError('no')\n"
    )
    distribution("watcher", {"broken_watcher": source})
    result = run("--max-steps", "1", "--log-dir", "never")
    assert result.code == 1
    assert "retrain_watch_run of watcher:broken_watcher raised ValueError: no" in result.err
    assert not (tmp_path / "never").exists()


def test_every_life_cycle_hook_has_an_implementer_of_ours() -> None:
    implemented = {
        node.name
        for file in ROOT.glob("retrain-*/src/**/*.py")
        if "hookimpl" in (text := file.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
        if any(ast.unparse(decorator).startswith("hookimpl") for decorator in node.decorator_list)
    }
    assert {name for name in HOOKS if not name.startswith("retrain_register_")} <= implemented
