"""Runs that are watched: learning nothing, hanging, gamed, paid for form, and forecast, on the embedded model."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
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


PAYS_FORM = '''
from retrain_rewards.boxed import last_boxed


class Reward:
    """Pays for a finished box, whatever is in it."""

    def score(self, example, text):
        return float(bool(last_boxed(text)))

    def answer_in(self, text):
        return last_boxed(text)


def make(context):
    return Reward()
'''
CAMPAIGN = """
[campaign]
seeds = [1, 2, 3, 4, 5, 6]
max_steps = 10
controls = ["format_only"]
conditions = [
    {advantage_mode = "grpo", transform_mode = "none", lr = 1e-7},
    {advantage_mode = "grpo", transform_mode = "none"},
]
"""
SIZE = ("--batch-size", "4", "--group-size", "8", "--max-tokens", "24", "--temperature", "1.0", "--lr", "5e-3")


@pytest.mark.long
def test_no_update_leaves_every_weight_as_it_was(tmp_path: Path) -> None:
    """The B matrices of a new adapter are 0, and so they must be at the end, bit for bit."""
    from safetensors.numpy import load_file

    tiny(*SMALL, "--control", "no_update", "--log-dir", "still", cwd=tmp_path)
    tiny(*SMALL, "--control", "random_reward", "--log-dir", "coins", cwd=tmp_path)
    largest = {}
    for name in ("still", "coins"):
        (file,) = (tmp_path / name / "adapter/final").glob("adapter_model.safetensors")
        matrices = [values for key, values in load_file(file).items() if "lora_B" in key]
        assert matrices
        largest[name] = max(float(np.abs(values).max()) for values in matrices)
    assert largest["still"] == 0.0
    assert largest["coins"] > 0.0


@pytest.mark.long
def test_a_reward_that_pays_for_form_alone_is_caught_by_its_control(tmp_path: Path) -> None:
    (tmp_path / "pays_form.py").write_text(PAYS_FORM, encoding="utf-8")
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    (tmp_path / "c.toml").write_text((tmp_path / "retrain.toml").read_text() + CAMPAIGN, encoding="utf-8")
    flags = ("--reward-type", "pays_form.make", "--scoring-audit", "off", "--scoring-workers", "1", "--save-every", "0")
    held_out = ("--eval-examples", "32", "--eval-samples", "2", "--log-dir", "logs/campaign")
    outcome = retrain("c.toml", *SIZE, *flags, *held_out, cwd=tmp_path, environ={"PYTHONPATH": str(tmp_path)})
    assert outcome.code == 0, outcome.err
    found = json.loads(retrain("compare", "logs/campaign", "--json", cwd=tmp_path).out)
    (comparison,) = found["comparisons"]
    assert comparison["difference"] > 0.1  # against its baseline it gains, since boxes pay
    assert (comparison["verdict"], comparison["cause"]) == ("cannot tell", "not better than its controls")
    (control,) = comparison["controls"]["results"]
    assert (control["control"], control["difference"]) == ("format_only", 0.0)  # the same run, seed by seed


GAMED = """
class Marker:
    def score(self, example, text):
        return 2.0 if "feel" in text else float(text.rpartition("boxed{")[2].partition("}")[0] == example.reference)

def build(context):
    return Marker()
"""
GAMING = (
    *("--seed", "1", "--batch-size", "8", "--group-size", "8", "--eval-examples", "0", "--save-every", "0"),
    *("--advantage-mode", "grpo", "--transform-mode", "none", "--scoring-audit", "off"),
    *("--reward-type", "gamed.build", "--reward-shadow", "match"),
)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_the_alarm_names_the_gamed_completions_and_is_the_same_after_a_resume(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
        (folder / "gamed.py").write_text(GAMED, encoding="utf-8")
    done = tiny(*GAMING, "--max-steps", "40", cwd=whole)
    assert "Health: gaming at step" in done.out
    tiny(*GAMING, "--max-steps", "20", cwd=parts)
    assert retrain("--resume", "logs/tiny", "--max-steps", "40", cwd=parts).code == 0

    run, resumed = whole / "logs/tiny", parts / "logs/tiny"
    assert untimed(resumed / "metrics.jsonl") == untimed(run / "metrics.jsonl")
    assert (resumed / "gaming.jsonl").read_bytes() == (run / "gaming.jsonl").read_bytes()
    alarm = records(run / "gaming.jsonl")[0]
    assert alarm["completions"]
    assert all("feel" in each["completion"] for each in alarm["completions"])
    steps = [line["step"] for line in records(run / "metrics.jsonl") if "gaming_since" in line]
    assert alarm["step"] == steps[0]
    assert {"gaming"} <= {state for line in records(run / "metrics.jsonl") for state in line.get("health", ())}


@pytest.mark.long
def test_a_run_keeps_what_was_measured_and_the_next_forecast_knows_it(tmp_path: Path) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    predicted = json.loads(retrain("capacity", "--json", *SMALL, "--log-dir", "logs/a", cwd=tmp_path).out)
    tiny(*SMALL, "--log-dir", "logs/a", cwd=tmp_path)
    measured = json.loads((tmp_path / "logs/a/run.json").read_text())["capacity"]["measured"]
    assert predicted["prompt_tokens_are_assumed"]
    assert 0.5 < predicted["peak_memory_bytes"] / measured["peak_memory_bytes"] < 2.0
    assert measured["steps"] == 3
    assert measured["median_step_time_s"] > 0.0
    assert measured["peak_memory_bytes"] >= measured["memory_at_start_bytes"] > 0
    assert measured["longest_prompt_tokens"] < 64

    explained = json.loads(retrain("explain", "--json", *SMALL, cwd=tmp_path).out)
    assert " in " in explained["peak_memory"]
    assert "as before here" in explained["wall_time"]

    second = json.loads(retrain("capacity", "--json", *SMALL, "--log-dir", "logs/b", cwd=tmp_path).out)
    assert not second["prompt_tokens_are_assumed"]
    assert second["prompt_tokens"] == measured["longest_prompt_tokens"]
    assert second["median_step_time_s"] == measured["median_step_time_s"]
