"""A run from the command line to the files it leaves, on the embedded model."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

from tests.end_to_end.running import SCRIPT, SMALL, records, retrain, tiny, untimed
from tests.end_to_end.terminal import converse
from tests.kit.shared import made_once

ORDER = (
    "Loading tokenizer for builtin:tiny ...",
    "Loading vocabulary table...",
    "Vocabulary table: ",
    "Loading dataset...",
    "Loaded ",
    "Pre-encoded ",
    "Loading train model: builtin:tiny on cpu...",
    "trainable params: ",
    "LocalTrainHelper ready (engine=pytorch, split_mode=False).",
    "Step 0 [maxrl+gtpo_sepa] | ",
    "Step 2 [maxrl+gtpo_sepa] | ",
    "Training complete. maxrl+gtpo_sepa, 3 steps",
    "Adapter saved to ",
    "Metrics saved to ",
)


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    def make(folder: Path) -> None:
        outcome = tiny("--seed", "1", *SMALL, "--eval-examples", "8", "--eval-samples", "2", cwd=folder)
        (folder / "console.txt").write_text(outcome.out, encoding="utf-8")

    folder = made_once(tmp_path_factory, "run", make)
    return folder, (folder / "console.txt").read_text(encoding="utf-8")


def test_console_lines_come_in_the_documented_order_without_escapes_or_panel(run: tuple[Path, str]) -> None:
    _, console = run
    at = 0
    for wanted in ORDER:
        found = console.find(wanted, at)
        assert found >= 0, f"{wanted!r} is missing after position {at} of:\n{console}"
        at = found
    assert "\x1b" not in console
    assert "time left" not in console
    assert not [line for line in console.partition("Next:")[0].splitlines() if line.startswith(" ")]


def test_metrics_hold_every_documented_field_and_the_evaluations(run: tuple[Path, str]) -> None:
    folder, _ = run
    before, *steps = records(folder / "logs/tiny/metrics.jsonl")
    assert before["step"] == -1
    assert {"eval_correct_rate", "eval_ci_low", "eval_ci_high", "eval_pass_at_1", "eval_pass_at_2"} <= set(before)
    assert before["eval_examples"] == 8
    assert [record["step"] for record in steps] == [0, 1, 2]
    assert "eval_correct_rate" in steps[-1]
    assert before["eval_ci_low"] <= before["eval_correct_rate"] <= before["eval_ci_high"]


def test_every_completion_is_recorded_trained_or_not(run: tuple[Path, str]) -> None:
    folder, _ = run
    generations = records(folder / "logs/tiny/emergence/generations.jsonl")
    steps = records(folder / "logs/tiny/emergence/steps.jsonl")
    assert len(generations) == 3 * 4 * 4
    for step in steps:
        mine = [g for g in generations if g["step"] == step["step"]]
        assert sum(g["reward"] > 0.5 for g in mine) == step["correct_count"]
        assert len(mine) == step["total_count"]
    assert {g["stop_reason"] for g in generations} <= {"eos", "length"}
    assert [g["policy_version"] for g in generations] == sorted(g["policy_version"] for g in generations)


def test_manifest_says_what_ran_and_its_config_runs_again(run: tuple[Path, str]) -> None:
    folder, _ = run
    manifest = json.loads((folder / "logs/tiny/run.json").read_text(encoding="utf-8"))
    assert manifest["status"] == "done"
    assert manifest["seed"] == 1
    assert manifest["origins"]["training.seed"] == "--seed"
    assert manifest["origins"]["model.model"].startswith("retrain.toml:")
    assert manifest["distributions"]["retrain-local"]
    config = folder / "logs/tiny/config.toml"
    assert tomllib.loads(config.read_text(encoding="utf-8"))["training"]["max_steps"] == 3
    again = retrain("explain", str(config), "--json", cwd=folder)
    assert again.code == 0, again.err
    assert json.loads(again.out)["max_steps"] == 3


def test_adapters_load_with_plain_peft(run: tuple[Path, str]) -> None:
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    from retrain.api import load_plugins

    folder, _ = run
    base = load_plugins().locate_model("builtin:tiny")
    for name in ("checkpoint_step_2", "final"):
        model = transformers.AutoModelForCausalLM.from_pretrained(base)
        adapted = peft.PeftModel.from_pretrained(model, folder / "logs/tiny/adapter" / name)
        assert any(bool(weight.any()) for key, weight in adapted.named_parameters() if "lora_B" in key)


def test_same_seed_same_run_and_another_seed_differs(run: tuple[Path, str], tmp_path: Path) -> None:
    folder, _ = run
    tiny("--seed", "1", *SMALL, "--eval-examples", "8", "--eval-samples", "2", cwd=tmp_path)
    tiny("--seed", "2", *SMALL, "--eval-examples", "8", "--eval-samples", "2", "--log-dir", "logs/other", cwd=tmp_path)
    same, other = tmp_path / "logs/tiny", tmp_path / "logs/other"
    assert untimed(folder / "logs/tiny/metrics.jsonl") == untimed(same / "metrics.jsonl")
    assert untimed(folder / "logs/tiny/metrics.jsonl") != untimed(other / "metrics.jsonl")
    generations = "emergence/generations.jsonl"
    assert (folder / "logs/tiny" / generations).read_bytes() == (same / generations).read_bytes()
    weights = "adapter/final/adapter_model.safetensors"
    assert (folder / "logs/tiny" / weights).read_bytes() == (same / weights).read_bytes()
    assert (same / weights).read_bytes() != (other / weights).read_bytes()


def test_the_documented_full_configuration_trains(tmp_path: Path) -> None:
    source = Path(__file__).parents[1] / "retrain-core/kernel/config/full_annotated.toml"
    small = ("--model", "builtin:tiny", "--devices", "cpu", "--data-source", "arithmetic", "--max-tokens", "24")
    adapter = (
        "--adapter-path",
        str(tmp_path / "adapter"),
        "--max-steps",
        "1",
        "--batch-size",
        "2",
        "--group-size",
        "2",
    )
    outcome = retrain(str(source), *small, *adapter, cwd=tmp_path)
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "adapter/final/adapter_model.safetensors").exists()
    assert len(records(tmp_path / "logs/train/metrics.jsonl")) == 1


def test_panel_shows_step_phase_sparkline_and_time_left(tmp_path: Path) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    code, drawn = converse([str(SCRIPT), *SMALL, "--eval-examples", "8", "--max-tokens", "32"], [], cwd=tmp_path)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", drawn)
    assert code == 0, plain
    assert re.search(r"step [1-3]/3", plain)
    assert re.search(r"  starting +━+ +for [\d.]+ m?s", plain), "while the model loads"
    assert re.search(r"\n  (sampling|scoring|training|recording|eval|checkpoint) +━+", plain)
    assert re.search(r"time left: [\d.]+ m?s", plain)
    assert re.search(r"correct +\d+\.\d%  [▁▂▃▄▅▆▇█]", plain)
    assert "held-out" in plain
    assert "Next:\n" in plain
    said = re.findall(r"(?:Step \d \[|Eval |Held-out: ).*", plain)
    assert len(said) == 3 + 2 + 1
    assert max(map(len, said)) <= 100
    assert re.fullmatch(r"Held-out: \d+\.\d% \[.*\] before -> \d+\.\d% \[.*\] after 3 steps", said[-1])
    assert "Step 2 [maxrl+gtpo_sepa]" in plain
    assert "  group: " not in plain
