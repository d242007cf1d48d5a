"""On-policy distillation on the embedded model: no verifier, as good as its teacher; and a kill changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.killing import killed_and_resumed
from tests.end_to_end.running import records, retrain, tiny

DISTILLING = ("--advantage-mode", "distillation")
UNJUDGED = ("--reward-type", "none", "--eval-examples", "0")
PLAIN = ("--transform-mode", "none", "--save-every", "0", "--lr", "3e-3", "--temperature", "0.7")
KILLED_AFTER_AN_UPDATE = """
from retrain_local.backend import LocalBackend
original = LocalBackend.train
def train(self, batch):
    report = original(self, batch)
    if batch.step == 1:
        kill()
    return report
LocalBackend.train = train
"""


def lines(folder: Path) -> list[dict[str, Any]]:
    return records(folder / "metrics.jsonl")


def held_out(folder: Path) -> float:
    return float(next(line["eval_correct_rate"] for line in reversed(lines(folder)) if "eval_correct_rate" in line))


@pytest.mark.long
def test_a_student_without_a_verifier_comes_near_its_teacher(tmp_path: Path) -> None:
    tiny(*PLAIN, "--max-steps", "25", "--eval-every", "0", "--seed", "7", "--log-dir", "teacher", cwd=tmp_path)
    teacher = ("--teacher-adapter", "teacher", *PLAIN, *DISTILLING, "--max-steps", "20")
    tiny(*teacher, *UNJUDGED, "--seed", "1", "--log-dir", "student", cwd=tmp_path)
    judged = ("--adapter", "student", *PLAIN, "--max-steps", "1", "--lr", "1e-9")
    tiny(*judged, "--log-dir", "judged", cwd=tmp_path)
    first = float(lines(tmp_path / "judged")[0]["eval_correct_rate"])
    assert first > held_out(tmp_path / "teacher") - 0.06  # measured: students 94 to 96 %
    divergences = [line["teacher_kl_mean"] for line in lines(tmp_path / "student")]
    assert sum(divergences[-5:]) < 0.4 * sum(divergences[:5])  # measured: 0.07 to 0.32


@pytest.mark.long
def test_a_kill_changes_nothing_and_nothing_is_said_of_a_verdict(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    size = ("--max-steps", "3", "--save-every", "1", "--batch-size", "4", "--group-size", "8", "--max-tokens", "24")
    arguments = (
        *size,
        *DISTILLING,
        "--transform-mode",
        "none",
        *UNJUDGED,
        "--teacher-model",
        "builtin:tiny",
        "--seed",
        "3",
        "--kl-coef",
        "0.01",
    )
    arguments += ("--sepa-delay-steps", "1")
    run = killed_and_resumed(tmp_path_factory, "distillation", tmp_path, KILLED_AFTER_AN_UPDATE, *arguments)
    found = lines(run)
    assert len(found) == 3
    assert found[0]["teacher_kl_mean"] < 1e-6 < found[2]["kl_mean"], "the teacher is what the student began as"
    for line in found:
        assert line["useful_groups"] == line["batch_size"] == 4
        assert not {"correct_rate", "running_correct_rate", "mean_reward", "no_verdict_count", "health"} & line.keys()
        assert line["num_datums"] == 32
    for command in (("status", str(run)), ("report", str(run)), ("compare", str(run), str(run))):
        done = retrain(*command, cwd=tmp_path)
        assert done.code == 0, (command, done.err)
