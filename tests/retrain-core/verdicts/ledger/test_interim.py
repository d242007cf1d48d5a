"""A look at an unfinished campaign is on record, whichever command shows its results, and counts when it must."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

import retrain
from retrain.verdicts.ledger.chain import NAME
from retrain.verdicts.ledger.history import read_chain
from retrain.verdicts.ledger.looks import InterimLooks, campaign_of
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options
from tests.kit.made_runs import MadeRun, write_campaign, write_run

Command = Callable[..., Any]
A, B = "grpo+none", "maxrl+none"
EFFECTS = {A: 0.0, B: 0.1}
SEEDS = tuple(range(1, 9))
RUN = f"logs/c/runs/{B}_s1"
COMMANDS = {
    "status": ("status", "logs", "--all", "--json"),
    "status inside": ("status", "logs/c", "--json"),
    "top": ("status", "logs", "--all"),
    "signal": ("signal", "logs/c"),
    "signal of a run": ("signal", RUN),
    "forecast": ("status", RUN, "--forecast"),
    "compare --variance": ("compare", "logs/c", "--variance"),
    "diff": ("diff", RUN, f"logs/c/runs/{A}_s1"),
}


@pytest.fixture
def unfinished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """`unfinished(4)`: a campaign in `logs/c` of eight seeds, of which so many are done and the others not begun."""
    monkeypatch.chdir(tmp_path)

    def build(num_done: int) -> Path:
        folder = write_campaign(Path("logs/c"), EFFECTS, seeds=SEEDS, steps=10, eval_every=5)
        for seed in SEEDS[num_done:]:
            for label in (A, B):
                shutil.rmtree(folder / f"runs/{label}_s{seed}")
        return folder

    return build


def finish(folder: Path, num_done: int) -> None:
    for seed in SEEDS[:num_done]:
        for label, effect in EFFECTS.items():
            if not (run := folder / f"runs/{label}_s{seed}").exists():
                write_run(run, MadeRun(condition=label, seed=seed, steps=10, eval_every=5, effect=effect))


def looks() -> list[Mapping[str, Any]]:
    return [entry.record for entry in read_chain(Path("logs") / NAME) if entry.record["kind"] == "look"]


@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_every_command_records_its_look_once(
    arguments: tuple[str, ...], unfinished: Callable[..., Path], command: Command
) -> None:
    folder = unfinished(4)
    for _ in range(3):
        assert command(*arguments).code in (0, 2)  # a forecast of a run that has ended, or from too few
    (look,) = looks()
    assert look["campaign"] == "c"
    assert look["seeds"] == {A: [1, 2, 3, 4], B: [1, 2, 3, 4]}
    finish(folder, 5)
    command(*arguments)
    assert [len(each["seeds"][A]) for each in looks()] == [4, 5]
    assert command("compare", "--ledger").code == 0


def test_a_finished_campaign_and_one_that_has_no_step_are_not_recorded(
    unfinished: Callable[..., Path], command: Command
) -> None:
    unfinished(8)
    for arguments in COMMANDS.values():
        command(*arguments)
    assert looks() == []
    shutil.rmtree("logs/c")
    unfinished(0)
    assert command("status", "logs", "--all").code == 0
    assert looks() == []


@pytest.mark.parametrize(("num_done", "design"), [(6, "anytime"), (8, "fixed")])
def test_a_look_counts_unless_all_seeds_ran(
    num_done: int, design: str, unfinished: Callable[..., Path], command: Command
) -> None:
    folder = unfinished(4)
    found = json.loads(command("status", "logs", "--all", "--json").out)
    assert found["campaigns"][0]["completed"] == 8
    finish(folder, num_done)
    study = comparison_with_ledger([folder], Options())
    assert study.comparisons[0].looks
    assert study.looks
    assert (study.comparisons[0].looks.design, len(study.looks.looks)) == (design, 2)
    runs = [run for run in sorted((folder / "runs").iterdir()) if not run.name.endswith("_s8")]
    assert len(comparison_with_ledger(runs, Options()).comparisons[0].seeds) == min(num_done, 7)


def test_a_look_from_python_is_recorded_or_only_warned_of(unfinished: Callable[..., Path], command: Command) -> None:
    unfinished(4)
    for what in ("rows", "metrics", "completions", "rows"):
        getattr(retrain.load(RUN), what)
    assert [look["by"] for look in looks()] == ["retrain.load"]
    (Path("logs") / NAME).unlink()
    (Path("logs") / NAME).mkdir()
    result = command("status", "logs", "--all", "--json")
    assert (result.code, "this look is not on record" in result.err) == (0, True)
    assert json.loads(result.out)["campaigns"]
    assert retrain.load(RUN).rows


def test_watching_records_each_state_once(unfinished: Callable[..., Path]) -> None:
    folder, told = unfinished(4), list[str]()
    interim = InterimLooks("watch", told.append)
    for num_done in (4, 4, 5, 5):
        finish(folder, num_done)
        interim.at([folder, folder / f"runs/{A}_s1", folder / f"runs/{A}_s1/adapter/final", Path("logs")])
    assert [len(look["seeds"][B]) for look in looks()] == [4, 5]
    assert (told, campaign_of(Path("logs")), campaign_of(Path("no/where"))) == ([], None, None)
