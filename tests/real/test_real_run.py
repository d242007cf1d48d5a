"""Runs of SmolLM2 as a user starts them: killed and resumed, memory as predicted, and one that learns."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.end_to_end.killing import check_nothing_is_half_written, check_same, finish, start
from tests.end_to_end.running import records, retrain
from tests.real.conftest import KINDS

pytestmark = [pytest.mark.real, pytest.mark.long, pytest.mark.timeout(900)]

DTYPES = ("fp32", "bf16")
SMALL = ("--max-steps", "3", "--batch-size", "2", "--group-size", "4", "--max-tokens", "16", "--save-every", "1")
# The gradient of the second optimizer step is there, and not yet applied.
MID_STEP = """
import retrain_local.training.trainer as trainer
original, calls = trainer.Trainer._update, []
def update(self, *given):
    calls.append(1)
    if len(calls) == 2:
        kill()
    return original(self, *given)
trainer.Trainer._update = update
"""


def started(folder: Path, smollm2: Path, *arguments: str, patch: str = "") -> tuple[int, str, str]:
    """A run of the template in a process of its own, with one thread; its exit code and output."""
    if not (folder / "retrain.toml").exists():
        assert retrain("init", "--template", "smollm2", cwd=folder).code == 0
    return finish(start(*arguments, "--model", str(smollm2), cwd=folder, patch=patch))


@pytest.mark.parametrize("dtype", DTYPES)
def test_killed_in_the_middle_of_a_step_and_resumed_it_is_the_run_never_killed(
    dtype: str, smollm2: Path, tmp_path: Path
) -> None:
    base = (*SMALL, "--eval-examples", "0", "--set", f"model.dtype={dtype}", "--lr", "1e-3")
    code, _, err = started(tmp_path, smollm2, *base, "--log-dir", "never")
    assert code == 0, err
    code, _, _ = started(tmp_path, smollm2, *base, "--log-dir", "killed", patch=MID_STEP)
    assert code == -9
    check_nothing_is_half_written(tmp_path / "killed")
    code, out, err = finish(start("--resume", "killed", cwd=tmp_path))
    assert code == 0, err
    assert "at step 1 from" in out
    check_same(tmp_path / "killed", tmp_path / "never")
    steps = [line for line in records(tmp_path / "never/metrics.jsonl") if "logprob_gap_mean" in line]
    assert len(steps) >= 2
    for line in steps:
        assert line["logprob_gap_mean"] < (1e-5 if dtype == "fp32" else 0.08)  # of some hundred tokens


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_as_predicted(kind: str, smollm2: Path, tmp_path: Path) -> None:
    size = ("--max-steps", "2", "--eval-examples", "0", "--max-tokens", "48", "--save-every", "0")
    base = (*size, *KINDS[kind])
    code, _, err = started(tmp_path, smollm2, *base, "--log-dir", "logs/first")
    assert code == 0, err
    shutil.rmtree(tmp_path / "logs/first/adapter")  # of all weights 2 GB
    again = ("--model", str(smollm2), "--log-dir", "logs/second")  # the length of prompts is known from the run
    predicted = json.loads(retrain("capacity", "--json", *base, *again, cwd=tmp_path).out)["peak_memory_bytes"]
    measured = json.loads((tmp_path / "logs/first/run.json").read_text(encoding="utf-8"))["capacity"]["measured"]
    assert predicted == pytest.approx(measured["peak_memory_bytes"], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "gap"), [("fp32", 1e-4), ("full", 1e-4), ("nf4", 2e-2)])
def test_it_learns(kind: str, gap: float, smollm2: Path, tmp_path: Path) -> None:
    """Sixteen steps. On another machine they differ by rounding, so less is asked for than what was seen.

    Of all weights and of an adapter on 4 bits too; every step is on policy.
    """
    given = ("--max-steps", "16", "--eval-examples", "0", "--save-every", "0", "--log-dir", "logs")
    rate = () if kind == "full" else ("--lr", "2e-4")
    assert retrain("init", "--template", "smollm2", cwd=tmp_path).code == 0
    done = retrain(*given, "--model", str(smollm2), *KINDS[kind], *rate, cwd=tmp_path)
    assert done.code == 0, done.err
    assert "kernels-community" not in done.err  # bitsandbytes' advice
    shutil.rmtree(tmp_path / "logs" / "adapter")  # up to 2 GB
    steps = [line for line in records(tmp_path / "logs/metrics.jsonl") if "correct_rate" in line]
    rates = [line["correct_rate"] for line in steps]
    assert len(rates) == 16
    assert sum(rates[-4:]) / 4 > sum(rates[:4]) / 4 + 0.15
    assert max(line.get("logprob_gap_max", 0.0) for line in steps) < gap
