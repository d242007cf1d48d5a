"""`retrain diff A B` on real and damaged runs; `retrain status --resume` says what `retrain --resume` then does."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.inspect.diff import side_by_side
from retrain.inspect.diff_command import HIGHER, LOWER, NEITHER, mark
from retrain.records.completions import write_tokens
from retrain.records.files import RunLock
from retrain.records.stored_tokens import read_tokens
from tests.kit.problems import codes_in

Command = Callable[..., Any]
Make = Callable[..., Path]


@pytest.fixture
def diff(printed_json: Command) -> Command:
    """`diff("a", "b")`: the JSON of `retrain diff`."""
    return partial(printed_json, "diff")


def edit(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def edit_lines(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    records = [change(json.loads(line)) for line in file.read_text().splitlines()]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))


def test_the_same_records_are_identical_until_a_token_differs(toy_run: Make, diff: Command, command: Command) -> None:
    shutil.copytree(toy_run("a", "--eval-examples", "2"), "b")
    content = diff("a", "b")
    assert (content["identical"], content["config"], content["packages"]) == (True, {}, {})
    assert (content["data"]["first_differing_batch"], content["metrics"]["first_diverging_step"]) == (None, None)
    assert (content["label_a"], content["steps_a"], content["steps_b"]) == ("a", 4, 4)
    lines = [json.loads(line) for line in Path("a/metrics.jsonl").read_text().splitlines()]
    assert content["curve_a"] == content["curve_b"] == [line["correct_rate"] for line in lines if line["step"] >= 0]
    names = ("loss", "correct_rate", "mean_reward", "eval_correct_rate", "eval_mean_reward")
    assert content["final_a"] == content["final_b"] == {name: lines[-1][name] for name in names}
    spent_s = sum(line.get("step_time_s", 0.0) + line.get("eval_time_s", 0.0) for line in lines)
    assert content["wall_time_a"] == pytest.approx(spent_s)
    assert "Identical: 4 steps, the same batches, the same numbers" in command("diff", "a", "b").out
    run = Path("b")
    others = [replace(each, tokens_T=np.concatenate([[19], each.tokens_T[1:]])) for each in read_tokens(run, 2)]
    write_tokens(run, 2, others)
    data = diff("a", "b")["data"]
    assert (data["first_differing_batch"], data["differing_part"]) == (2, "tokens")
    file = run / "emergence/tokens/step_000001.safetensors"
    file.write_bytes(file.read_bytes()[:50])
    result = command("diff", "a", "b")
    assert (result.code, "step_000001.safetensors: no readable token records" in result.err) == (2, True)


def test_another_learning_rate_parts_the_runs_after_step_0(toy_run: Make, diff: Command, command: Command) -> None:
    toy_run("a", "--group-size", "32", "--backend-opt", "step_size=0.0", "--lr", "1e-5")
    toy_run("b", "--group-size", "32", "--backend-opt", "step_size=9.0", "--lr", "2e-5")
    content = diff("a", "b")
    assert set(content["config"]) == {"backend.options.step_size", "training.lr"}
    assert content["config"]["training.lr"] == {"a": 1e-5, "b": 2e-5, "origin_a": "--lr", "origin_b": "--lr"}
    assert content["data"]["examples_a"] == content["data"]["examples_both"]
    step, fields = content["metrics"]["first_diverging_step"], content["metrics"]["fields"]
    assert content["data"]["differing_part"] == "completions"
    assert content["data"]["first_differing_batch"] > 0
    assert step > 0
    assert fields
    a, b = (json.loads(Path(name, "metrics.jsonl").read_text().splitlines()[step]) for name in "ab")
    assert all((a[name], b[name]) == (sides["a"], sides["b"]) for name, sides in fields.items())
    assert not any(name.endswith("time_s") for name in fields)
    shown = command("diff", "a", "b").out
    assert "training.lr" in shown
    assert "the same prompts, other completions" in shown


def test_code_and_packages(make_run: Make, diff: Command) -> None:
    clean = {"commit": "c" * 40, "dirty": False}
    a = make_run("a", git=clean, libraries={"numpy": "2.0", "peft": "1"}, distributions={"mine": "1.0"})
    b = make_run("b", git=clean, libraries={"numpy": "2.1"}, distributions={"mine": "1.1"})
    content = diff(a, b)
    numpy = {"a": "2.0", "b": "2.1"}
    assert content["packages"] == {"mine": {"a": "1.0", "b": "1.1"}, "numpy": numpy, "peft": {"a": "1"}}
    assert (content["code"]["same"], content["identical"]) == (True, True)
    for git, same in ((clean | {"dirty": True}, None), ({"commit": "d" * 40, "dirty": True}, False), ({}, None)):
        edit(b / "run.json", git=git)
        assert diff(a, b)["code"]["same"] is same


def test_settings_differ_by_value_type_and_presence_and_name_their_origin(make_run: Make, diff: Command) -> None:
    a, b = make_run("a", origins={"training.lr": "retrain.toml:3", "data.options": "--data-opt"}), make_run("b")
    text = "[training]\nlr = {lr}\nx = [1]\n[data.options]\n{more}[logging]\nlog_dir = '{lr}'\n"
    (a / "config.toml").write_text(text.format(lr=1.0, more="count = 3\n"))
    (b / "config.toml").write_text(text.format(lr=1, more="") + "[new]\ny = 0\n")
    assert diff(a, b)["config"] == {
        "data.options.count": {"a": 3, "origin_a": "--data-opt"},
        "new.y": {"b": 0, "origin_b": "default"},
        "training.lr": {"a": 1.0, "b": 1, "origin_a": "retrain.toml:3", "origin_b": "default"},
    }


def test_a_killed_run_is_compared_by_its_whole_steps(make_run: Make, diff: Command, command: Command) -> None:
    a, b = make_run("a"), make_run("b", status="running")
    lines = (b / "metrics.jsonl").read_text().splitlines(keepends=True)
    (b / "metrics.jsonl").write_text("".join(lines[:-1]) + lines[-1][:20])
    with (b / "emergence/generations.jsonl").open("a") as stream:
        stream.write('{"step": 3, "group": 0, "exa')
    content = diff(a, b)
    assert (content["identical"], content["steps_a"], content["steps_b"]) == (False, 3, 2)
    assert (content["data"]["first_differing_batch"], content["metrics"]["first_diverging_step"]) == (None, None)
    assert content["data"]["examples_a"] > content["data"]["examples_b"] == content["data"]["examples_both"] == 2
    assert "Identical up to the shorter run (2 steps)." in command("diff", "a", "b").out


def test_a_run_without_steps_has_nothing_to_compare(make_run: Make, diff: Command, command: Command) -> None:
    make_run("a", metrics="", steps=0)
    make_run("b")
    content = diff("a", "b")
    assert set(content["final_a"].values()) == {None}
    assert (content["identical"], content["curve_a"], content["steps_a"]) == (False, [], 0)
    shown = command("diff", "a", "b").out
    assert "Nothing to compare" in shown
    [row] = [line.split() for line in shown.splitlines() if line.startswith("loss")]
    assert row == ["loss", "—", "0.4800"]
    make_run("c", metrics="", steps=0)
    assert diff("a", "c")["identical"] is False


def test_fields_of_one_run_are_no_divergence_and_missing_completions_are_told(make_run: Make, diff: Command) -> None:
    a, b = make_run("a"), make_run("b")
    edit_lines(a / "metrics.jsonl", lambda line: line | {"sepa_gate_open": True, "condition": "x", "step_time_s": 9.0})
    edit_lines(b / "metrics.jsonl", lambda line: line | ({"loss": None} if line["step"] == 2 else {}))
    file = b / "emergence/generations.jsonl"
    file.write_text("".join(line for line in file.read_text().splitlines(keepends=True) if '"step": 1,' not in line))
    content = diff(a, b)
    differing = {"fields": {"loss": {"a": 0.48, "b": None}}, "only_a": ["sepa_gate_open"], "only_b": []}
    assert content["metrics"] == {"common_steps": 3, "first_diverging_step": 2, **differing}
    data = content["data"]
    assert (data["first_differing_batch"], data["differing_part"], data["only_a"]) == (1, "missing", ["e1"])


@pytest.mark.parametrize(
    ("name", "content", "place"),
    [
        *((name, None, name) for name in ("run.json", "config.toml", "metrics.jsonl", "emergence/generations.jsonl")),
        ("run.json", '{\n"a": }', "run.json:2"),
        ("config.toml", "[training]\nlr = = 1\n", "config.toml:2"),
        ("config.toml", "\0", "config.toml:1"),
        ("metrics.jsonl", '{"step": 0}\n{"step": 1, "loss": Infinity}\n', "metrics.jsonl:2"),
        ("metrics.jsonl", '{"step": 0}\n{"loss": 1}\n', "metrics.jsonl:2"),
        ("emergence/generations.jsonl", '{"step": 0}\n\x07\n{"step": 1}\n', "generations.jsonl:2"),
        ("emergence/generations.jsonl", '{"step": 1}\n{"step": 0}\n', "generations.jsonl:2"),
    ],
)
def test_a_damaged_file_is_named(make_run: Make, command: Command, name: str, content: str | None, place: str) -> None:
    make_run("a")
    file = make_run("b") / name
    file.unlink() if content is None else file.write_text(content)
    result = command("diff", "a", "b")
    assert (result.code, result.out, f"{place}: cannot be read" in result.err) == (2, "", True)
    assert "Traceback" not in result.err


def test_what_the_files_hold_cannot_steer_the_terminal(make_run: Make, command: Command) -> None:
    evil = "\x1b[2J[bold]"
    a, b = make_run("a\x1b[2J", git={"commit": evil, "dirty": False}, status=evil), make_run("b")
    (a / "config.toml").write_text('[training]\nname = "\\u001b[2J[bold]"\n"\\u001b[31m" = 1\n')
    edit(b / "run.json", libraries={evil: evil}, origins={"training.max_steps": evil})
    for file in ("emergence/generations.jsonl", "metrics.jsonl"):
        edit_lines(a / file, lambda line: line | {"example_id": evil, evil: 1})
        edit_lines(b / file, lambda line: line | {"example_id": evil * 2, "loss": evil})
    result = command("diff", str(a), str(b))
    assert result.code == 0
    assert "\x1b" not in result.out
    assert "\ufffd[2J[bold]" in result.out


def test_marks_point_at_the_better_run() -> None:
    assert mark(0.5, 0.25, HIGHER) == "< A"
    assert mark(0.25, 0.5, HIGHER) == "B >"
    assert mark(1.0, 2.0, LOWER) == "< A"
    assert mark(2.0, 2.0, LOWER) == mark(2.0, 2.0, NEITHER) == "="
    assert mark(1.0, 2.0, NEITHER) == mark(None, 2.0, HIGHER) == ""


STEPS = st.lists(st.integers(-1, 12), unique=True).map(sorted)


@given(a=STEPS, b=STEPS)
def test_side_by_side_gives_every_step_once(a: list[int], b: list[int]) -> None:
    rows = list(side_by_side(iter([(step, f"a{step}") for step in a]), iter([(step, f"b{step}") for step in b])))
    assert rows == [
        (step, f"a{step}" if step in a else None, f"b{step}" if step in b else None) for step in sorted({*a, *b})
    ]


LOG = "logs/train"
STOPPING = """
import os, signal
from retrain.api import Watcher, hookimpl

class Stopping(Watcher):
    @hookimpl
    def retrain_run_start(self, run):
        self.first_step = run.first_step

    def phase(self, step, phase):
        if (step, phase) == (3, "sampling") and not self.first_step:
            os.kill(os.getpid(), signal.SIGTERM)

@hookimpl
def retrain_watch_run(context): return Stopping()

@hookimpl
def retrain_save_state(run): return {"stopping": {"n": 1}}
"""


@pytest.fixture
def stopped(command: Command, toy_arguments: list[str], distribution: Make, tmp_path: Path) -> Path:
    """A run of four steps that was stopped within the last one."""
    distribution("retrain-stopping", {"stopping": STOPPING})
    base = [*toy_arguments, "--max-steps", "4", "--save-every", "1"]
    assert command(*base).code == 75
    return tmp_path / LOG


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def data(result: Any) -> dict[str, Any]:
    return json.loads(result.out)


def test_it_says_what_would_be_restored_and_the_resume_does_it(stopped: Path, command: Command) -> None:
    with (stopped / "metrics.jsonl").open("a") as stream:
        stream.write('{"torn')
    before = contents(stopped)
    result = command("status", LOG, "--resume")
    assert (result.code, result.err) == (0, "")
    size = len(before["metrics.jsonl"])
    place = f"{LOG} can be resumed at step 3, from {LOG}/adapter/checkpoint_step_3"
    cut = f"metrics.jsonl: cut from {size} to {size - 6} bytes"
    for part in (place, "all checksums match", "3 steps, 6 prompts sampled", "stopping", cut):
        assert part in result.out
    assert contents(stopped) == before
    found = data(command("status", LOG, "--resume", "--json"))
    assert (found["can_resume"], found["next_step"], found["is_complete"]) == (True, 3, False)
    assert found["not_restored"] == []
    resumed = command("--resume", LOG)
    assert resumed.code == 0
    assert f"Resuming {LOG} at step 3 from {LOG}/adapter/checkpoint_step_3" in resumed.out
    found = data(command("status", LOG, "--resume", "--json"))
    assert (found["can_resume"], found["next_step"], found["is_complete"]) == (True, 4, True)
    assert "is complete" in command("status", LOG, "--resume").out


@pytest.mark.long
def test_a_living_run_additions_and_damages_are_told_one_by_one(stopped: Path, command: Command) -> None:
    def checked() -> dict[str, Any]:
        return data(command("status", LOG, "--resume", "--json"))

    program = "import sys; from retrain.cli.command_line import run; code = run(['status', 'logs/train', '--resume'])\n"
    program += "print(code, [name for name in ('torch', 'transformers', 'datasets') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", program], cwd=stopped.parents[1], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "0 []", done.stdout + done.stderr
    lock = RunLock(stopped)
    living = command("status", LOG, "--resume")
    lock.release()
    assert (living.code, "still active" in living.out) == (1, True)
    newest, restored = stopped / "adapter/checkpoint_step_3", checked()["restored"][0]["detail"]
    (newest / "notes").mkdir()
    for name in ("notes/a.txt", "b.txt"):
        (newest / name).write_text("x" * 10_000)
    found = checked()
    assert found["restored"][0]["detail"] == restored
    (lost,) = found["not_restored"]
    assert lost["detail"] == "2 without a checksum, not part of the checkpoint: b.txt, notes/a.txt"
    (newest / "logits.json").write_text("[]")
    found = checked()
    assert (found["can_resume"], found["next_step"]) == (True, 2)
    assert "checkpoint_step_3/logits.json: is damaged" in found["not_restored"][0]["detail"]
    for folder in (stopped / "adapter").iterdir():
        (folder / "logits.json").unlink()
    assert "the run starts again with its own seed" in command("status", LOG, "--resume").out


@pytest.mark.long
def test_records_that_were_cut_stand_in_the_way(stopped: Path, command: Command) -> None:
    (stopped / "emergence/steps.jsonl").write_text("")
    result = command("status", LOG, "--resume")
    assert (result.code, "emergence/steps.jsonl: has 0 bytes" in result.out) == (1, True)


def test_every_differing_key_stands_in_the_way(stopped: Path, command: Command, tmp_path: Path) -> None:
    text = (stopped / "config.toml").read_text()
    other = text.replace("group_size = 4", "group_size = 5").replace("max_tokens = 3", "max_tokens = 4")
    (tmp_path / "other.toml").write_text(other.replace("max_steps = 4", "max_steps = 9"))
    result = command("status", LOG, "--resume", "--config", "other.toml", "--json")
    assert result.code == 1
    keys = [text.split(" was ")[0] for text in data(result)["obstacles"]]
    assert keys == ["training.group_size", "training.max_tokens"]


def test_damaged_records_stand_in_the_way_unless_one_insists(stopped: Path, command: Command) -> None:
    file = stopped / "emergence/generations.jsonl"
    file.write_bytes(file.read_bytes().replace(b'"reward": 0.0', b'"reward": 1.0', 1))
    (stopped / "emergence/tokens/step_000001.safetensors").unlink()
    found = data(command("status", LOG, "--resume", "--json"))
    (obstacle,) = found["obstacles"]
    assert obstacle.startswith(f"{LOG}/emergence/generations.jsonl is damaged: its checksum differs")
    (lost,) = found["not_restored"]
    assert (lost["part"], lost["detail"][:30]) == ("records", "1 token file is missing, first")
    refused = command("--resume", LOG)
    assert (refused.code, f"{LOG}/emergence/generations.jsonl is damaged" in refused.err) == (2, True)
    assert command("--resume", LOG, "--resume-anyway").code == 0
    assert data(command("status", LOG, "--resume", "--json"))["can_resume"]
    (accepted,) = json.loads((stopped / "run.json").read_text())["resumes"][0]["accepted"]
    assert "generations.jsonl is damaged" in accepted


@pytest.mark.parametrize("text", [None, "", "[]", "{}"])
def test_no_run_no_resume(text: str | None, command: Command, tmp_path: Path, tokenizer_folder: Path) -> None:
    (tmp_path / "retrain.toml").write_text("")
    (tmp_path / "folder").mkdir()
    if text is not None:
        (tmp_path / "folder/run.json").write_text(text)
    result = command("status", "folder", "--resume", "--json")
    assert (result.code, codes_in(data(result)["obstacles"][0].splitlines()[0])) == (1, ["resume.no-run"])
