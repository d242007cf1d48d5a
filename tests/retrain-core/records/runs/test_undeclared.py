"""Runs that differ in more than their conditions say are named: keys, code, data, plugins, libraries, devices."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.records.identity.collect import Identity
from retrain.records.identity.copies import write_inputs
from retrain.records.identity.hashing import Budget, PluginFiles, hash_file
from tests.kit.edited import edit

EFFECTS = {"grpo+none": 0.0, "maxrl+none": 0.1}
SEEDS = [1, 2]
Compare = Callable[..., dict[str, Any]]
Change = Callable[[str, Callable[[dict[str, Any]], object]], None]


@pytest.fixture
def folder(made: Any, tmp_path: Path) -> Path:
    """A campaign of two conditions x two seeds."""
    path: Path = made.write_campaign(tmp_path / "c", EFFECTS, seeds=SEEDS, steps=20)
    return path


@pytest.fixture
def change(folder: Path) -> Change:
    """`change("grpo+none_s1", lambda record: ...)`: edit the `run.json` of a run."""
    return lambda name, how: edit(folder / "runs" / name / "run.json", how)


@pytest.fixture
def record(folder: Path, change: Change, tmp_path: Path) -> Callable[..., None]:
    """`record("grpo+none_s1", reward="return 1", own={...}, version="1.0")`: what the run consisted of."""

    def write(name: str, *, reward: str = "return 1", version: str = "1.0", own: bool = False) -> None:
        source = tmp_path / "reward.py"
        source.write_text(f"def score():\n    {reward}\n")
        files = [hash_file("reward.py", source, Budget())]
        if own:
            (tmp_path / "extra.py").write_text("EXTRA = 1\n")
            files.append(hash_file("extra.py", tmp_path / "extra.py", Budget()))
        plugin = PluginFiles(version=version, is_ours=False, root="", files=())
        identity = Identity(code=tuple(files), plugins={"their-plugin": plugin})
        write_inputs(folder / "runs" / name, identity)
        change(name, lambda content: content.update(identity=identity.summary()))

    return write


def record_all(record: Callable[..., None]) -> None:
    for label in EFFECTS:
        for seed in SEEDS:
            record(f"{label}_s{seed}")


def test_alike_runs_differ_in_nothing(folder: Path, record: Callable[..., None], compare_json: Compare) -> None:
    assert compare_json(folder)["unknown_inputs"] == 4
    record_all(record)
    record("maxrl+none_s1", own=True)  # a part that only this condition names
    record("maxrl+none_s2", own=True)
    content = compare_json(folder)
    assert (content["undeclared"], content["unknown_inputs"]) == ([], 0)


def test_code_of_one_run_and_of_one_condition(
    folder: Path, record: Callable[..., None], compare_json: Compare, compare: Any
) -> None:
    record_all(record)
    record("maxrl+none_s2", reward="return 0")
    told = "maxrl+none_s2: reward.py:2 changed: 'return 1' is now 'return 0' (against maxrl+none_s1)"
    content = compare_json(folder)
    assert content["undeclared"] == [told]
    assert content["standing"] == "exploratory"
    assert "the runs differ in more than their conditions say" in content["exploratory"]
    for arguments in ((), ("--markdown",)):
        shown = compare(folder, *arguments).out.replace("\\", "")
        assert f"differs in more than its condition says: {told}" in shown
    record("maxrl+none_s1", reward="return 0")
    record("grpo+none_s2", own=True)
    assert sorted(compare_json(folder)["undeclared"]) == [
        "grpo+none_s2: extra.py was not part of the run (against grpo+none_s1)",
        "maxrl+none: reward.py:2 changed: 'return 1' is now 'return 0' (against grpo+none)",
    ]


def test_plugins_libraries_and_devices(
    folder: Path, record: Callable[..., None], change: Change, compare_json: Compare
) -> None:
    record_all(record)
    for seed in SEEDS:
        record(f"maxrl+none_s{seed}", version="2.0")
    change("grpo+none_s2", lambda content: content["libraries"].update(torch="2.8.0"))
    change("grpo+none_s1", lambda content: content.update(devices={"used": "cpu", "why": ""}))
    change("maxrl+none_s1", lambda content: content.update(devices={"used": "gpu:0", "why": ""}))
    assert compare_json(folder)["undeclared"] == [
        "grpo+none_s2: torch 2.8.0, not 2.13.0+cpu (against grpo+none_s1)",
        "maxrl+none: their-plugin was 1.0 and is now 2.0 (against grpo+none)",
        "maxrl+none: trained on a GPU, not on a CPU (against grpo+none)",
    ]


def test_keys_that_the_campaign_does_not_say(folder: Path, change: Change, compare_json: Compare) -> None:
    values = {"training.lr": 0.003, "training.batch_size": 8, "logging.log_dir": "x", "training.max_steps": 5}
    conditions = {"grpo+none": values, "maxrl+none": values | {"training.lr": 0.5}}
    (folder / "campaign.json").write_text(json.dumps({"conditions": conditions}))
    for seed in SEEDS:
        change(f"maxrl+none_s{seed}", lambda content: content["config"]["training"].update(lr=0.5))
    assert compare_json(folder)["undeclared"] == []  # the condition sets it
    change("maxrl+none_s2", lambda content: content["config"]["training"].update(lr=0.1))
    assert compare_json(folder)["undeclared"] == ["maxrl+none_s2: training.lr is 0.1, the campaign says 0.5"]


def test_keys_of_plain_runs(made: Any, tmp_path: Path, compare_json: Compare) -> None:
    runs = []
    for condition, lr in (("grpo+none", 0.003), ("maxrl+none", 0.5)):
        run = made.MadeRun(condition=condition, steps=20, config={"training": {"lr": lr}})
        runs.append(made.write_run(tmp_path / condition, run))
    assert compare_json(*runs)["undeclared"] == ["maxrl+none: training.lr is 0.5, in grpo+none it is 0.003"]
    more = made.MadeRun(condition="maxrl+none", steps=20, config={"training": {"lr": 0.003}})
    runs.append(made.write_run(tmp_path / "more", more))
    assert compare_json(*runs)["undeclared"] == []  # labels that differ in it show it


def test_an_insisted_resume_is_told(folder: Path, change: Change, compare_json: Compare) -> None:
    entry = {"step": 12, "time": "2026-03-01", "accepted": ["reward.py:3 changed"], "noticed": []}
    change("grpo+none_s2", lambda content: content.update(resumes=[entry]))
    assert compare_json(folder)["undeclared"] == ["grpo+none_s2: resumed at step 12 although reward.py:3 changed"]


@pytest.mark.parametrize("content", ["[]", '{"conditions": []}', '{"conditions": {"grpo+none": 3}}', "{"])
def test_hostile_records_are_no_traceback(folder: Path, change: Change, compare_json: Compare, content: str) -> None:
    (folder / "campaign.json").write_text(content)
    hostile = {"identity": [1], "devices": "cpu", "libraries": 3, "resumes": [3, {"accepted": 4}]}
    change("grpo+none_s2", lambda record: record.update(hostile))
    assert compare_json(folder)["unknown_inputs"] == 4
