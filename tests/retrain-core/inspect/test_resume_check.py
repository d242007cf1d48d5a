"""`retrain status --resume` tells before anything is loaded what `retrain --resume` then does."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.records.files import RunLock
from tests.kit.problems import codes_in

LOG = "logs/train"
Command = Callable[..., Any]
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
def stopped(command: Command, toy_arguments: list[str], distribution: Callable[..., Path], tmp_path: Path) -> Path:
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
