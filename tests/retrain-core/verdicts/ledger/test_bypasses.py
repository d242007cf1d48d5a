"""Every way around a plan is named in the verdict, makes it exploratory, and fails `retrain compare --ledger`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from retrain.records.files import seal_of
from retrain.verdicts.ledger.chain import NAME
from retrain.verdicts.study.comparison_with_ledger import comparison_with_ledger
from retrain.verdicts.study.study import Options
from retrain.verdicts.wording.command import command as compare_command
from tests.kit.invoke import invoke

Change = Callable[..., None]
RUN, OTHER = Path("runs/maxrl+none_s1"), Path("runs/maxrl+none_s2")
LATER = "2036-03-01T12:00:05+00:00"


def edit(file: Path, **fields: Any) -> None:
    content = json.loads(file.read_text())
    for path, value in fields.items():
        table, _, key = path.rpartition("__")
        inner = content
        for name in filter(None, table.split("__")):
            inner = inner[name]
        inner[key] = value
    file.write_text(json.dumps(content))


def reseal(folder: Path, **_: Any) -> None:
    plan = json.loads((folder / "manifest.json").read_text())["plan"] | {"primary_metric": "correct_rate:final"}
    edit(folder / "manifest.json", plan=plan | {"sha256": seal_of(plan)})


def copy_metrics(folder: Path, **_: Any) -> None:
    shutil.copy(folder / OTHER / "metrics.jsonl", folder / RUN / "metrics.jsonl")


def edit_a_digit(folder: Path, **_: Any) -> None:
    file = folder / RUN / "metrics.jsonl"
    file.write_text(file.read_text().replace('"step": 3', '"step": 3 ', 1))


def add_evaluations(folder: Path, **_: Any) -> None:
    (folder / RUN / "eval.jsonl").write_text("{}\n")


def other_rate(folder: Path, **_: Any) -> None:
    for seed in (1, 2):
        edit(folder / f"runs/maxrl+none_s{seed}/run.json", config__training__lr=0.01)


def other_model(folder: Path, **_: Any) -> None:
    edit(folder / RUN / "run.json", config__model__model="builtin:other")


def other_code(folder: Path, **_: Any) -> None:
    edit(folder / RUN / "run.json", identity={"code": {"digest": "d"}})


def set_aside(folder: Path, **_: Any) -> None:
    edit(folder / RUN / "run.json", status="failed")


def delete(folder: Path, **_: Any) -> None:
    shutil.rmtree(folder / RUN)


def re_roll(folder: Path, *, made: ModuleType, recorded: Callable[..., Path]) -> None:
    shutil.rmtree(folder / RUN)
    made.write_run(folder / RUN, made.MadeRun(seed=1, steps=10, effect=0.3, eval_every=5))
    recorded(folder / RUN, started=LATER)


def run_again(folder: Path, *, made: ModuleType, recorded: Callable[..., Path]) -> None:
    (folder / RUN).rename(folder / f"{RUN}.kept")
    made.write_run(folder / RUN, made.MadeRun(seed=1, steps=10, effect=0.3, eval_every=5))
    recorded(folder / RUN, started=LATER)


def bring_in(folder: Path, *, made: ModuleType, **_: Any) -> None:
    (folder / RUN).rename(folder / f"{RUN}.kept")
    made.write_run(folder / RUN, made.MadeRun(seed=1, steps=10, effect=0.3, eval_every=5))
    edit(folder / RUN / "run.json", started=LATER)


def redefine(folder: Path, **_: Any) -> None:
    edit(folder / "manifest.json", sha256="another")


def edit_the_ledger(folder: Path, **_: Any) -> None:
    file = folder.parent / NAME
    file.write_text(file.read_text().replace('"state": "done"', '"state": "gone"', 1))


def drop_from_the_ledger(folder: Path, **_: Any) -> None:
    file = folder.parent / NAME
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3] + file.read_text().splitlines(True)[4:]))


BYPASSES: dict[Change, tuple[str, ...]] = {
    reseal: ("the plan was resealed",),
    copy_metrics: ("the same metrics.jsonl", "maxrl+none_s1", "maxrl+none_s2"),
    edit_a_digit: ("maxrl+none_s1: changed since the run ended: metrics.jsonl",),
    add_evaluations: ("maxrl+none_s1: changed since the run ended: eval.jsonl",),
    other_rate: ("maxrl+none_s2: changed since the run ended: the settings in run.json",),
    other_model: ("maxrl+none_s1: changed since the run ended: the settings in run.json",),
    other_code: ("maxrl+none_s1: changed since the run ended: code and data in run.json",),
    set_aside: ("maxrl+none_s1: run.json says failed, the run ended done",),
    delete: ("maxrl+none_s1, begun 2026-03-01T12:00:05+00:00, done after 10 steps, is gone",),
    re_roll: ("done after 10 steps, is gone; it was run again at 2036",),
    run_again: ("maxrl+none_s1, begun 2026-03-01T12:00:05+00:00, was done; it was run again at 2036",),
    bring_in: ("maxrl+none_s1: the ledger never saw it begin, although it saw its campaign open",),
    redefine: ("does not define the campaign that was run",),
    edit_the_ledger: ("ledger.jsonl: line", "was edited"),
    drop_from_the_ledger: ("ledger.jsonl: line 4", "does not follow"),
}


@pytest.mark.parametrize("change", BYPASSES, ids=lambda change: change.__name__)
def test_a_way_around_the_plan_is_named(
    change: Change,
    campaign: Callable[..., Path],
    made: ModuleType,
    recorded: Callable[..., Path],
) -> None:
    folder = campaign()
    change(folder, made=made, recorded=recorded)
    study = comparison_with_ledger([folder], Options())
    named = "\n".join(study.notices)
    assert all(words in named for words in BYPASSES[change]), named
    assert study.standing == "exploratory"
    result = invoke(compare_command, ["--ledger"])
    assert result.exit_code == 1
    assert all(words in result.output for words in BYPASSES[change]), result.output


def test_an_honest_campaign_is_as_planned(
    campaign: Callable[..., Path], compare_json: Callable[..., dict[str, Any]], command: Callable[..., Any]
) -> None:
    folder = campaign()
    study = compare_json(folder)
    assert (study["standing"], study["exploratory"], study["notices"]) == ("planned", [], [])
    result = command("compare", "--ledger", "logs", "--json")
    content = json.loads(result.out)
    assert (result.code, content["intact"], content["findings"]) == (0, True, [])
    assert command("compare", "--ledger", str(folder / RUN), "--head", content["head"]).code == 0
    cut = command("compare", "--ledger", "--head", "f" * 64)
    assert cut.code == 1
    assert "cut or rewritten" in cut.out


@pytest.mark.parametrize("is_deleted", [False, True])
def test_a_second_campaign_of_a_plan_is_named_in_both(
    is_deleted: bool,
    campaign: Callable[..., Path],
    compare_json: Callable[..., dict[str, Any]],
    command: Callable[..., Any],
) -> None:
    first, second = campaign(), campaign("campaign_b", is_new=True)
    folders = [first, second]
    if is_deleted:
        shutil.rmtree(folders.pop(0))
    for folder in folders:
        study = compare_json(folder)
        named = next(line for line in study["notices"] if "second campaign of the same plan, by --new" in line)
        assert named.endswith("and it is gone") is is_deleted
        assert study["standing"] == "exploratory"
    result = command("compare", "--ledger")
    assert result.code == 1
    assert "second campaign of the same plan" in result.out


def test_another_campaign_in_the_same_folder_has_not_run_the_earlier_one_again(
    campaign: Callable[..., Path], compare_json: Callable[..., dict[str, Any]]
) -> None:
    folder = campaign()
    folder.rename(folder.with_name("campaign_a.1"))  # as `--new` does with a folder that was given
    named = compare_json(campaign(is_new=True, started="2026-03-02T12:00:05+00:00", hypothesis="another"))["notices"]
    assert not [line for line in named if "run again at" in line], named


def test_a_renamed_folder_keeps_its_looks(
    campaign: Callable[..., Path], compare_json: Callable[..., dict[str, Any]]
) -> None:
    folder = campaign()
    compare_json(folder, "--metric", "loss")
    renamed = folder.rename("logs/renamed")
    for options in ((), ("--metric", "loss")):
        assert compare_json(renamed, *options)["shopping"]["looks"] == 2


def test_looks_and_metrics_are_counted_once_each(
    campaign: Callable[..., Path],
    compare: Callable[..., Any],
    compare_json: Callable[..., dict[str, Any]],
    command: Callable[..., Any],
) -> None:
    folder = campaign()
    for options in ((), (), ("--metric", "loss", "--lower"), ("--at", 8), ("--last", 2), ()):
        compare_json(folder, *options)
    study = compare_json(folder)
    assert study["shopping"] == {
        "looks": 4,
        "metrics": ["eval_correct_rate:final", "loss:final"],
        "choices": 4,
        "registered_in": "campaign.toml",
    }
    assert "4 looks, at 2 metrics, with 4 choices" in compare(folder).out
    assert [line.split()[1] for line in command("compare", "--ledger", "--events").out.splitlines()][-8:] == [
        "look",
        "verdict",
    ] * 4


def test_a_moved_folder_is_no_fraud(
    campaign: Callable[..., Path],
    compare_json: Callable[..., dict[str, Any]],
    command: Callable[..., Any],
    tmp_path: Path,
) -> None:
    folder = campaign()
    moved = tmp_path / "elsewhere" / "campaign_a"
    moved.parent.mkdir()
    shutil.copytree(folder, moved)
    study = compare_json(moved)
    assert study["standing"] == "planned, unverified"
    assert [line.startswith("unknown: ") for line in study["notices"]] == [True]
    shutil.copytree("logs", tmp_path / "whole")
    assert command("compare", "--ledger", str(tmp_path / "whole")).code == 0
    folder.rename(folder.with_name("renamed"))
    assert command("compare", "--ledger", "logs").code == 0


def test_without_a_ledger_it_is_said_that_nothing_is_known(
    campaign: Callable[..., Path], compare_json: Callable[..., dict[str, Any]], command: Callable[..., Any]
) -> None:
    folder = campaign()
    (folder.parent / NAME).unlink()
    assert command("compare", "--ledger").code == 2
    assert "the ledger knows nothing before" in compare_json(folder)["notices"][0]
    result = command("compare", "--ledger")
    assert result.code == 0
    assert "the ledger knows nothing before" in result.out


def test_a_ledger_that_cannot_be_written_changes_no_verdict(
    campaign: Callable[..., Path], compare_json: Callable[..., dict[str, Any]]
) -> None:
    folder = campaign()
    (folder.parent / NAME).unlink()
    (folder.parent / NAME).mkdir()
    study = compare_json(folder)
    assert study["comparisons"][0]["verdict"] == "cannot tell"
    assert "cannot be read" in study["notices"][0]


def test_runs_given_one_by_one_count_those_that_are_gone(
    made: ModuleType,
    recorded: Callable[..., Path],
    compare_json: Callable[..., dict[str, Any]],
    tmp_path: Path,
) -> None:
    for seed in (1, 2):
        recorded(made.write_run(tmp_path / "logs" / f"a{seed}", made.MadeRun(seed=seed, steps=10, eval_every=5)))
    re_rolled = tmp_path / "logs" / "a1"
    shutil.rmtree(re_rolled)
    recorded(made.write_run(re_rolled, made.MadeRun(seed=1, steps=10, effect=0.2, eval_every=5)), started=LATER)
    named = compare_json(re_rolled, tmp_path / "logs" / "a2")["notices"]
    assert [line for line in named if line.startswith("a1, begun 2026") and "run again at 2036" in line]


def test_runs_that_failed_before_their_first_line_are_no_copies(
    made: ModuleType,
    recorded: Callable[..., Path],
    command: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    for seed in (1, 2):
        run = made.write_run(Path(f"logs/s{seed}"), made.MadeRun(seed=seed, status="failed"))
        (run / "metrics.jsonl").write_text("")
        recorded(run, RuntimeError("out of memory"))
    result = command("compare", "--ledger")
    assert (result.code, "metrics.jsonl" in result.out) == (0, False), result.out
