"""A run whose folder is deleted, moved, replaced or cut ends with an error, and what was in hand is beside it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.shared import made_once, slow_or_long

Run = Callable[..., Any]
LOG, SAVED = "logs/train", "logs/train.rescued"
LOSING = """
import shutil
from pathlib import Path
from retrain.api import Watcher, hookimpl

LOG, ADAPTERS = Path("logs/train"), Path("logs/train/adapter")

def delete(folder):
    folder.rename("gone")  # the heartbeat may write there meanwhile
    shutil.rmtree("gone")

ACTIONS = {
    "deleted": lambda: delete(LOG),
    "all deleted": lambda: delete(LOG.parent),
    "moved": lambda: LOG.rename("elsewhere"),
    "replaced": lambda: (LOG.rename("elsewhere"), shutil.copytree("elsewhere", LOG)),
    "one deleted": lambda: (LOG / "metrics.jsonl").unlink(),
    "cut": lambda: (LOG / "emergence/generations.jsonl").open("r+b").truncate(10),
    "adapter deleted": lambda: delete(ADAPTERS),
    "adapter replaced": lambda: (ADAPTERS.rename("elsewhere"), ADAPTERS.mkdir()),
}

class Acting(Watcher):
    def phase(self, step, phase):
        file = Path("act.txt")
        if file.exists() and [phase, str(step)] == file.read_text().split(":")[:2]:
            action = file.read_text().split(":")[2]
            file.unlink()
            ACTIONS[action]()

@hookimpl
def retrain_watch_run(context): return Acting()
"""


@pytest.fixture
def run(
    command: Callable[..., Any], toy_arguments: list[str], distribution: Callable[..., Path], tmp_path: Path
) -> Run:
    """`run("deleted", "scoring", 2)`: a run of four steps to whose folder that is done in that phase."""
    distribution("retrain-losing", {"losing": LOSING})
    base = [*toy_arguments, "--max-steps", "4", "--save-every", "1"]

    def call(action: str, phase: str, step: int, *arguments: str) -> Any:
        (tmp_path / "act.txt").write_text(f"{phase}:{step}:{action}")
        return command(*base, *arguments)

    return call


@pytest.fixture
def never(run: Run, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run to which nothing happens."""

    def make(folder: Path) -> None:
        assert run("", "", 0, "--log-dir", "never").code == 0
        (tmp_path / "never").rename(folder / "never")

    return made_once(tmp_path_factory, "never-lost", make) / "never"


def untimed(file: Path) -> list[dict[str, Any]]:
    lines = map(json.loads, file.read_text().splitlines())
    return [{key: value for key, value in line.items() if not key.endswith("time_s")} for line in lines]


LOSSES = [("deleted", "scoring", 2, 2), ("all deleted", "recording", 1, 1), ("moved", "checkpoint", 3, 3)]
LOSSES += [("replaced", "scoring", 0, 0), ("one deleted", "checkpoint", 4, 4)]


@pytest.mark.parametrize(("action", "phase", "step", "num_lines"), slow_or_long(LOSSES, LOSSES[0]))
def test_the_run_ends_and_continues_from_the_folder_next_to_it(
    action: str, phase: str, step: int, num_lines: int, never: Path, run: Run, command: Any, tmp_path: Path
) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / SAVED).write_text("of somebody else")
    result = run(action, phase, step)
    assert result.code == 1
    assert "Metrics saved" not in result.out
    assert "was deleted, moved, replaced or cut during the run" in result.err
    saved = Path(f"{SAVED}.1" if action != "all deleted" else SAVED)
    assert f"the state of the run is saved in {saved}" in result.err
    assert f"`retrain --resume {saved}` continues there" in result.err
    assert len(untimed(tmp_path / saved / "metrics.jsonl")) >= num_lines
    assert json.loads((tmp_path / saved / "run.json").read_text())["status"] == "failed"
    assert (tmp_path / saved / "inputs/files.json").exists()
    again = command("--resume", str(saved))
    assert "no hashes" not in again.err
    assert again.code == 0, again.err
    for name in ("metrics.jsonl", "emergence/generations.jsonl", "emergence/steps.jsonl"):
        assert untimed(tmp_path / saved / name) == untimed(never / name)
    for name in ("logits.json", "trained.json"):
        there = (never / "adapter/final" / name).read_bytes()
        assert (tmp_path / saved / "adapter/final" / name).read_bytes() == there


def test_a_file_that_is_cut_is_told_too(run: Run, tmp_path: Path) -> None:
    result = run("cut", "scoring", 2)
    assert result.code == 1
    assert f"{LOG}/emergence/generations.jsonl: was deleted, moved, replaced or cut" in result.err
    assert len(untimed(tmp_path / SAVED / "metrics.jsonl")) == 2


@pytest.mark.long
@pytest.mark.parametrize("action", slow_or_long(["adapter deleted", "adapter replaced"], "adapter replaced"))
def test_a_checkpoint_folder_is_missed_at_the_next_checkpoint(
    action: str, run: Run, command: Callable[..., Any], tmp_path: Path
) -> None:
    result = run(action, "sampling", 2)
    assert result.code == 1
    assert f"{LOG}/adapter: was deleted, moved, replaced or cut during the run" in result.err
    assert f"fix: move it to {LOG}/adapter, then `retrain --resume {LOG}`" in result.err
    shutil.rmtree(tmp_path / LOG / "adapter", ignore_errors=True)
    (tmp_path / LOG / "adapter.rescued").rename(tmp_path / LOG / "adapter")
    assert command("--resume", LOG).code == 0
    assert [line["step"] for line in untimed(tmp_path / LOG / "metrics.jsonl")] == [0, 1, 2, 3]
