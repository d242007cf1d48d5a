"""Real runs watched: controls catch a reward for form alone, an alarm a gamed one, and a forecast meets its run."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.running import SMALL, records, retrain, tiny, untimed

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
