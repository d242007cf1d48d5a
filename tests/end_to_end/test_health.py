"""Runs that learn nothing and runs that hang, on the embedded model through the installed script."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.end_to_end.running import SMALL, records, retrain, tiny, untimed
from tests.kit.shared import made_once

CUT = (*SMALL, "--seed", "1", "--max-tokens", "4", "--max-steps", "6")
ARTEFACTS = ("emergence/generations.jsonl", "adapter/final/adapter_model.safetensors")
SLEEPER = """
import time
from pathlib import Path

class Sleeper:
    def score(self, example, text):
        if Path("awake").exists() or int(Path("calls").read_text()) < 20:
            Path("calls").write_text(str(int(Path("calls").read_text()) + 1))
            return float(len(text) % 3 == 0)
        fall_asleep()

def fall_asleep():
    while True:
        try:
            time.sleep(1000)
        except Exception:
            pass

def build(context):
    return Sleeper()
"""


def warnings(text: str) -> list[str]:
    return [line.split(":")[1].strip() for line in text.splitlines() if line.startswith("Health: ")]


@pytest.fixture(scope="session")
def cut(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Six steps of which every completion is cut off: the run's folder, and its console."""

    def make(folder: Path) -> None:
        (folder / "console.txt").write_text(tiny(*CUT, cwd=folder).out, encoding="utf-8")

    folder = made_once(tmp_path_factory, "cut", make)
    return folder / "logs/tiny", (folder / "console.txt").read_text(encoding="utf-8")


def test_truncation_is_told_once_after_three_steps_and_recorded_at_each(cut: tuple[Path, str]) -> None:
    folder, console = cut
    assert warnings(console) == ["truncation at step 2", "no_useful_groups at step 2"]
    assert "[training] max_tokens = 4); fix: raise [training] max_tokens" in console
    assert "useful=0/4 (4 wrong)" in console
    states = [record.get("health") for record in records(folder / "metrics.jsonl")]
    assert states == [None, None, *[["truncation", "no_useful_groups"]] * 4]


@pytest.mark.long
def test_policy_stop_saves_and_ends_with_code_1_and_resuming_gives_the_same_run(
    cut: tuple[Path, str], tmp_path: Path
) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    stopped = retrain(*CUT, "--health-policy", "stop", cwd=tmp_path)
    assert stopped.code == 1
    assert "retrain: health\nstep 2: truncation: 3 steps in a row" in stopped.err
    folder = tmp_path / "logs/tiny"
    manifest = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "failed"
    assert "truncation" in manifest["error"]
    assert (folder / "adapter/checkpoint_step_3/adapter_model.safetensors").exists()

    resumed = retrain("--resume", "logs/tiny", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert warnings(resumed.out) == []
    assert untimed(folder / "metrics.jsonl") == untimed(cut[0] / "metrics.jsonl")
    for name in ARTEFACTS:
        assert (folder / name).read_bytes() == (cut[0] / name).read_bytes(), name


@pytest.mark.long
@pytest.mark.parametrize("signal_step", ["1", "2"])
def test_a_run_resumed_in_the_middle_of_a_row_warns_at_the_same_step(
    cut: tuple[Path, str], tmp_path: Path, signal_step: str
) -> None:
    first = tiny(*CUT, "--max-steps", signal_step, cwd=tmp_path)
    assert warnings(first.out) == []
    resumed = retrain("--resume", "logs/tiny", "--max-steps", "6", cwd=tmp_path)
    assert resumed.code == 0, resumed.err
    assert warnings(resumed.out) == ["truncation at step 2", "no_useful_groups at step 2"]
    assert untimed(tmp_path / "logs/tiny/metrics.jsonl") == untimed(cut[0] / "metrics.jsonl")


@pytest.mark.slow
def test_a_scorer_that_hangs_is_named_saved_and_resumable(tmp_path: Path) -> None:
    arguments = (*SMALL, "--seed", "1", "--reward-type", "sleeper.build", "--max-tokens", "8", "--save-every", "0")
    arguments += ("--scoring-audit", "off", "--scoring-timeout-s", "1000", "--scoring-workers", "1")
    arguments += ("--scoring-cache", "false")

    def start(name: str, *more: str, is_awake: bool) -> Path:
        folder = tmp_path / name
        folder.mkdir()
        (folder / "sleeper.py").write_text(SLEEPER, encoding="utf-8")
        (folder / "calls").write_text("0")
        if is_awake:
            (folder / "awake").touch()
        assert retrain("init", "--template", "tiny", cwd=folder).code == 0
        outcome = retrain(*arguments, *more, cwd=folder)
        assert outcome.code == (0 if is_awake else 1), outcome.err
        if not is_awake:
            assert "step 1, scoring: the phase took longer than [deadlines] scoring_s = 2 seconds" in outcome.err
            assert "in collect" in outcome.err
        return folder

    whole, hung = start("whole", is_awake=True), start("hung", "--deadline-scoring-s", "2", is_awake=False)
    run = hung / "logs/tiny"
    assert "in collect" in (run / "stacks.txt").read_text(encoding="utf-8")
    assert json.loads((run / "heartbeat.json").read_text())["phase"] == "ended"
    manifest = json.loads((run / "run.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "failed"
    assert "scoring_s" in manifest["error"]

    (hung / "awake").touch()
    resumed = retrain("--resume", "logs/tiny", "--deadline-scoring-s", "0", cwd=hung)
    assert resumed.code == 0, resumed.err
    assert "Resuming logs/tiny at step 1" in resumed.out
    assert untimed(run / "metrics.jsonl") == untimed(whole / "logs/tiny/metrics.jsonl")
    for name in ARTEFACTS:
        assert (run / name).read_bytes() == (whole / "logs/tiny" / name).read_bytes(), name
