"""Verifiable tasks, measured: the embedded model learns another library's tasks, judged by that library's own rules."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

import pytest

from tests.end_to_end.running import records, retrain

GAMES = Path(__file__).parents[1] / "retrain-rewards/environments/verifiers_library/packages"
HEAD = """
[model]
model = "builtin:tiny"
lora_rank = 16
[backend]
devices = "cpu"
[training]
seed = {seed}
max_steps = {steps}
batch_size = 8
group_size = 16
max_tokens = 64
temperature = 1.0
lr = 3e-3
save_every = 4
[eval]
every = 0
examples = 32
samples = 4
[logging]
log_dir = "logs/run"
"""
CHAIN_SUM = """
[data]
source = "reasoning_gym"
[data.options]
name = "chain_sum"
size = 600
config = {min_terms = 2, max_terms = 2, min_digits = 1, max_digits = 2}
"""
GUESSING = """
[environment]
provider = "verifiers"
id = "guess_number"
args = {rounds = 40, secrets = [3, 7]}
"""

CALCULATOR = Path(__file__).parents[1] / "kit" / "mcp_calculator.py"
CALCULATING = """
[environment]
provider = "mcp"
max_turns = 3
args = {{ servers = {{ calculator = {{ command = ["{python}", "mcp_calculator.py"], tools = ["add"] }} }} }}
[data]
source = "arithmetic"
"""


def configured(folder: Path, tasks: str, *, seed: int = 1, steps: int) -> Path:
    shutil.copy(GAMES / "guess_number.py", folder)
    (folder / "retrain.toml").write_text(HEAD.format(seed=seed, steps=steps) + tasks)
    return folder


def trained(folder: Path, *arguments: str) -> list[dict[str, object]]:
    outcome = retrain(*arguments, cwd=folder)
    assert outcome.code == 0, outcome.err
    return records(folder / "logs/run/metrics.jsonl")


def rates(lines: list[dict[str, object]]) -> tuple[float, float]:
    found = [float(str(line["eval_correct_rate"])) for line in lines if "eval_correct_rate" in line]
    return found[0], found[-1]


@pytest.mark.long
def test_a_task_of_reasoning_gym_is_learnt_by_its_own_verifier(tmp_path: Path) -> None:
    before, after = rates(trained(configured(tmp_path, CHAIN_SUM, steps=20)))
    assert before < 0.65
    assert after > 0.85


@pytest.mark.slow
@pytest.mark.long
def test_a_game_of_two_turns_is_learnt(tmp_path: Path) -> None:
    pytest.importorskip("verifiers.legacy", reason="the game is written for the classic generation of verifiers")
    lines = trained(configured(tmp_path, GUESSING, steps=10))
    before, after = rates(lines)
    assert before < 0.5
    assert after > 0.85
    steps = [line for line in lines if int(str(line["step"])) >= 0]
    assert float(str(steps[0]["turns_mean"])) > 1.2
    assert all(float(str(line["logprob_gap_max"])) < 1e-4 for line in steps if "logprob_gap_max" in line)
    assert all(line["rewritten_history_count"] == 0 for line in steps)


@pytest.mark.slow
def test_a_run_with_tools_of_an_mcp_server_trains_and_leaves_no_server(tmp_path: Path) -> None:
    pytest.importorskip("mcp", reason="needs the extra mcp of retrain-rewards")
    shutil.copy(CALCULATOR, tmp_path)
    lines = trained(configured(tmp_path, CALCULATING.format(python=sys.executable), steps=2))
    steps = [line for line in lines if int(str(line["step"])) >= 0]
    assert len(steps) == 2
    assert all(line["rewritten_history_count"] == 0 for line in steps)
    assert float(str(steps[-1]["turns_mean"])) >= 1.0
    deadline = time.monotonic() + 10.0
    while (left := _processes_in(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left


def _processes_in(folder: Path) -> list[str]:
    return [str(cwd.parent) for cwd in Path("/proc").glob("[0-9]*/cwd") if _leads_to(cwd, folder)]


def _leads_to(link: Path, folder: Path) -> bool:
    try:
        return link.readlink() == folder
    except OSError:
        return False
