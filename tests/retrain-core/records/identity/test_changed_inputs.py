"""A run whose reward, transform, advantage, data or plugin changed by one character is not resumed as the same run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Run = Callable[..., Any]
LOG = "logs/train"
SOURCE = """
from pathlib import Path
from retrain.api import Example, LoadedData

def make(context):
    return Lines()

class Lines:
    def load(self):
        lines = Path("unnamed").read_text().splitlines()
        return LoadedData(examples=tuple(Example(id=line, prompt=line, reference=line) for line in lines))
"""
EDITS = [
    ("mine/reward.py", "==", "!=", "mine/reward.py:12"),
    ("mine/helpers.py", "[0]", "[1]", "mine/helpers.py:2"),
    ("mine/transform.py", "a + 0.0", "a - 0.0", "mine/transform.py:5"),
    ("mine/advantage.py", "reward - mean", "mean - reward", "mine/advantage.py:3"),
    ("tasks.jsonl", "2 plus 3", "2 plus 9", "tasks.jsonl:12"),
    ("site/stopping.py", "step == 2", "step == 9", "site/stopping.py:8"),
]


def edit(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def manifest(tmp_path: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((tmp_path / LOG / "run.json").read_text())
    return found


def test_one_changed_character_is_refused_with_file_and_line_and_accepted_on_request(run: Run, tmp_path: Path) -> None:
    assert run().code == 75
    for name, old, new, _ in EDITS:
        edit(tmp_path / name, old, new)
    result = run("--resume", LOG)
    assert result.code == 2
    for *_, place in EDITS:
        assert place in result.err
    assert "'    return text.split()[0]" not in result.err
    assert "return text.split()[0] if text.split() else" in result.err
    assert "return text.split()[1] if text.split() else" in result.err
    assert "--resume-anyway" in result.err
    assert manifest(tmp_path)["status"] == "stopped"
    assert "resumes" not in manifest(tmp_path)
    check = run("status", LOG, "--resume")
    assert check.code == 1
    for *_, place in EDITS:
        assert place in check.out

    result = run("--resume", LOG, "--resume-anyway")
    assert result.code == 0, result.err
    (entry,) = manifest(tmp_path)["resumes"]
    assert entry["step"] == 2
    assert len(entry["accepted"]) == len(EDITS) + 1
    assert entry["accepted"][-1].startswith("the data source gives other examples")
    assert "mine/reward.py" in str(entry["accepted"])
    former = tmp_path / LOG / "inputs/until_step_2/code/mine/reward.py"
    assert "==" in former.read_text()
    assert "!=" in (tmp_path / LOG / "inputs/code/mine/reward.py").read_text()

    told = "resumed at step 2 although mine/reward.py:12 changed"
    edit(tmp_path / "mine/reward.py", "!=", "==")
    assert run("--log-dir", "logs/other").code == 0
    assert told in run("status", "logs").out
    assert told in run("status", LOG, "--resume", "--config", f"{LOG}/config.toml").out
    shown = run("diff", LOG, "logs/other").out
    assert f"A was {told}" in shown
    assert "code  mine/reward.py  differs" in shown
    for line in (
        "-        return Score.of(float(first_word(text) !=",
        "+        return Score.of(float(first_word(text) ==",
    ):
        assert line in shown


def test_what_even_resume_anyway_cannot_do_is_said_before_data_and_model_load(run: Run, tmp_path: Path) -> None:
    assert run("--transform-mode", "gtpo_sepa", "--sepa-steps", "5").code == 75
    result = run("--resume", LOG, "--sepa-steps", "9", "--resume-anyway")
    assert result.code == 2
    assert "[sepa] steps: is 9, but the checkpoint was made with 5" in result.err
    assert "--resume-anyway cannot change that" in result.err
    assert "Loading dataset" not in result.out + result.err
    text = (tmp_path / LOG / "config.toml").read_text()
    (tmp_path / "other.toml").write_text(text.replace("steps = 5\n", "steps = 9\n"))
    check = run("status", LOG, "--resume", "--config", "other.toml")
    assert check.code == 1
    assert "--resume-anyway cannot change that" in check.out


@pytest.mark.long
def test_other_examples_are_noticed_wherever_the_source_reads_them(run: Run, tmp_path: Path) -> None:
    (tmp_path / "mine/source.py").write_text(SOURCE)
    (tmp_path / "unnamed").write_text("1 plus 2 ?\n2 plus 3 ?\n3 plus 4 ?\n")
    assert run("--data-source", "mine.source.make", "--data-path", "").code == 75
    assert manifest(tmp_path)["examples"] | {"digest": ""} == {"train": 3, "held_out": 0, "digest": ""}
    edit(tmp_path / "unnamed", "3 plus 4 ?\n", "3 plus 5 ?\n")
    result = run("--resume", LOG)
    assert result.code == 2
    assert "other examples: 3 to train on, 0 held out as before, but prompts, references or order differ" in result.err
    edit(tmp_path / "unnamed", "3 plus 5 ?\n", "")
    assert "other examples: 3 to train on, 0 held out, and now 2 to train on, 0 held out" in run("--resume", LOG).err
    assert run("--resume", LOG, "--resume-anyway").code == 0
    assert "the data source gives other examples" in run("status", "logs").out


def test_a_changed_key_is_refused_with_its_file_and_line(run: Run, tmp_path: Path) -> None:
    assert run().code == 75
    text = (tmp_path / LOG / "config.toml").read_text()
    assert "[data.template_args]\n" in text
    (tmp_path / "mine.toml").write_text(text.replace("[data.template_args]\n", "[data.template_args]\nthinking = 1\n"))
    result = run("mine.toml", "--resume", LOG)
    assert result.code == 2
    assert "data.template_args was {} and is now {'thinking': 1} (mine.toml:" in result.err
    assert "[data] template_args)" in result.err
