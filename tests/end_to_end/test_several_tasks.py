"""A run of several tasks: killed and resumed it is the same, and each task has its numbers, records and errors."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.killing import check_same, finish, start
from tests.end_to_end.running import records, retrain
from tests.kit.shared import made_once

pytestmark = pytest.mark.timeout(900)
HEAD = """
[model]
model = "builtin:tiny"
lora_rank = 8
[backend]
backend = "local"
devices = "cpu"
[training]
seed = 3
max_steps = 6
batch_size = 4
group_size = 4
max_tokens = 24
temperature = 1.0
lr = 1e-3
save_every = 1
[algorithm]
normalise_by = "task"
[eval]
every = 3
samples = 2
[data]
schedule = "posterior"
sampler = "thompson"
dead_task = "pause"
dead_steps = 1
"""
SUMS = """
[[data.tasks]]
name = "sums"
source = "arithmetic"
options = { operations = ["+"] }
held_out = 6
"""
PRODUCTS = """
[[data.tasks]]
name = "products"
source = "arithmetic"
options = { operations = ["*"], size = 300 }
instruction = "Think, and box the number: \\\\boxed{}."
reward = { type = "match", shadow = "math" }
held_out = 4
"""
GAME = """
[[data.tasks]]
name = "game"
environment = { provider = "parts.Game", timeout_s = 5.0 }
"""
KILL = """
from retrain.records.folder import RunFolder
at(RunFolder, "write_metrics", kill, nth(4))
"""


@pytest.fixture(scope="session")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    def make(folder: Path) -> None:
        (folder / "two.toml").write_text(HEAD + SUMS + PRODUCTS, encoding="utf-8")
        code, _, err = finish(start("two.toml", "--log-dir", "never", cwd=folder))
        assert code == 0, err

    return made_once(tmp_path_factory, "several-tasks", make)


def test_killed_and_resumed_it_is_the_run_that_was_left_alone(work: Path) -> None:
    assert finish(start("two.toml", "--log-dir", "killed", cwd=work, patch=KILL))[0] < 0
    code, _, err = finish(start("--resume", "killed", cwd=work))
    assert code == 0, err
    check_same(work / "killed", work / "never")


def test_every_task_has_its_numbers_and_no_group_mixes_them(work: Path) -> None:
    lines = [line for line in records(work / "never/metrics.jsonl") if line["step"] >= 0]
    drawn = records(work / "never/emergence/generations.jsonl")
    for line in lines:
        own = {each["group"]: {each["example_id"].split("/")[0]} for each in drawn if each["step"] == line["step"]}
        assert all(len(tasks) == 1 for tasks in own.values())
        count = sum(tasks == {"sums"} for tasks in own.values())
        assert line["task_sums_share"] == count / 4
        rates = [
            line[f"task_{name}_correct_rate"] for name in ("sums", "products") if f"task_{name}_correct_rate" in line
        ]
        assert line["macro_correct_rate"] == pytest.approx(sum(rates) / len(rates))
    last = lines[-1]
    by_task = [last["eval_sums_correct_rate"], last["eval_products_correct_rate"]]
    assert last["eval_correct_rate"] == pytest.approx(sum(by_task) / 2)
    assert last["eval_examples"] == last["eval_sums_examples"] + last["eval_products_examples"] == 10
    assert last["eval_ci_low"] < last["eval_correct_rate"] < last["eval_ci_high"]
    held_out = {each["example"] for each in records(work / "never/eval.jsonl")}
    assert held_out.isdisjoint(each["example_id"] for each in drawn)
    # Only products has a shadow, and its alarm is of that task and of all.
    assert {name for line in lines for name in line if name.endswith("gaming_evidence")} <= {
        "gaming_evidence",
        "task_products_gaming_evidence",
    }


def test_status_signal_and_eval_show_the_tasks(work: Path) -> None:
    found = json.loads(retrain("status", "never", "--json", cwd=work).out)["runs"][0]
    assert {*found["eval_rates"]} == {"held_out", "sums", "products", "weighted"}
    account = json.loads(retrain("signal", "never", "--json", cwd=work).out)["runs"][0]
    assert {each["difficulty"] for each in account["tasks"]} <= {"sums", "products"}
    assert sum(each["tokens"] for each in account["tasks"]) == sum(each["tokens"] for each in account["prompts"])
    assert "Prompts by task" in retrain("signal", "never", cwd=work).out
    shutil.copytree(work / "never", work / "again", dirs_exist_ok=True)
    found = retrain("eval", "again", "--json", cwd=work)
    assert found.code == 0, found.err
    results = json.loads(found.out)["results"]
    assert {each["set"]: each["own"] for each in results} == {
        "sums": {"same_as_run": 12, "of": 12},
        "products": {"same_as_run": 8, "of": 8},
    }


def test_a_task_with_an_environment_is_played_next_to_one_of_data(tmp_path: Path) -> None:
    """Killed and resumed it is the same; a game that is broken leaves the other task as it is."""
    shutil.copy(Path(__file__).parents[1] / "soak/parts.py", tmp_path / "parts.py")
    keys = "[eval]\nexamples = 2"
    (tmp_path / "two.toml").write_text(HEAD.replace("[eval]", keys) + SUMS + GAME, encoding="utf-8")
    for folder, patch in (("never", ""), ("killed", KILL)):
        code, _, err = finish(start("two.toml", "--log-dir", folder, cwd=tmp_path, patch=patch))
        assert (code < 0) is bool(patch), err
    code, _, err = finish(start("--resume", "killed", cwd=tmp_path))
    assert code == 0, err
    check_same(tmp_path / "killed", tmp_path / "never")
    lines = records(tmp_path / "never/metrics.jsonl")
    assert any("turns_mean" in line and line.get("task_game_share") for line in lines)
    assert (lines[-1]["eval_sums_examples"], lines[-1]["eval_game_examples"]) == (6, 2)
    drawn = records(tmp_path / "never/emergence/generations.jsonl")
    of_game = [each for each in drawn if each["example_id"].startswith("game/")]
    assert {each.get("turns") for each in of_game} != {each.get("turns") for each in drawn if each not in of_game}
    found = retrain("eval", "never", "--json", cwd=tmp_path)
    assert found.code == 0, found.err
    assert {each["set"] for each in json.loads(found.out)["results"]} == {"sums", "game"}


def test_one_task_in_a_table_learns_what_the_plain_run_learns(tmp_path: Path) -> None:
    """The list of length one: only names differ."""
    head = HEAD.partition("[data]")[0].replace("max_steps = 6", "max_steps = 2")
    options = 'source = "arithmetic"\noptions = { operations = ["+"] }\n'
    (tmp_path / "one.toml").write_text(f'{head}\n[[data.tasks]]\nname = "sums"\n{options}', encoding="utf-8")
    (tmp_path / "plain.toml").write_text(f"{head}\n[data]\n{options}", encoding="utf-8")
    for name in ("one", "plain"):
        code, _, err = finish(start(f"{name}.toml", "--log-dir", name, cwd=tmp_path))
        assert code == 0, err
    one, plain = (records(tmp_path / name / "metrics.jsonl")[-1] for name in ("one", "plain"))
    assert {*plain} <= {*one}
    assert not any("task" in field for field in plain)


FAULTS = {
    "name twice": (SUMS + SUMS, "data.task-name-twice"),
    "no name": (SUMS.replace('name = "sums"\n', "") + PRODUCTS, "data.bad-task-name"),
    "weight of zero": (SUMS + "weight = 0\n" + PRODUCTS, "weight"),
    "weight and schedule": (SUMS + "weight = 2\n" + PRODUCTS, "data.weight-and-schedule"),
    "unknown source": (SUMS.replace('"arithmetic"', '"arithmetics"'), "did you mean 'arithmetic'?"),
    "unknown reward": (SUMS + 'reward = "mach"\n', "did you mean 'match'?"),
    "unknown key": (SUMS + "wieght = 2\n", "wieght"),
    "tasks within a task": (SUMS + 'schedule = "weight"\n', "data.key-of-run"),
    "a single task too": (SUMS + "[environment]\nmax_turns = 3\n", "data.single-task-key"),
    "weight of NaN": (SUMS + "weight = nan\n" + PRODUCTS, "weight"),
    "infinite weight": (SUMS + "weight = inf\n" + PRODUCTS, "weight"),
    "name of a path": (SUMS.replace('"sums"', '"../sums"') + PRODUCTS, "data.bad-task-name"),
    "name of no text": (SUMS.replace('"sums"', "3") + PRODUCTS, "name"),
    "name of all tasks": (SUMS.replace('"sums"', '"weighted"') + PRODUCTS, "data.bad-task-name"),
    "less than nothing held out": (SUMS.replace("held_out = 6", "held_out = -1"), "held_out"),
    "unknown environment": (SUMS + GAME, "parts.Game"),
    "too much held out": (SUMS.replace("held_out = 6", "held_out = 9999"), "eval.too-many-examples"),
    "no data": (
        '[[data.tasks]]\nname = "mine"\nsource = "files"\npath = "empty.jsonl"\n' + SUMS,
        "[[data.tasks]] mine",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_table_is_refused_with_its_place_before_a_model_loads(fault: str, tmp_path: Path) -> None:
    tables, said = FAULTS[fault]
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "two.toml").write_text(HEAD + tables, encoding="utf-8")
    found = retrain("two.toml", cwd=tmp_path)
    assert found.code == 2
    assert said in found.err
    assert "two.toml:" in found.err
    assert "fix:" in found.err
    assert "Loading train model" not in found.out
