"""A warm start of the embedded model: it learns what it hardly ever samples, RL goes on from there; and a kill."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from tests.end_to_end.killing import BASE, killed_and_resumed
from tests.end_to_end.running import records, tiny

SFT = ("--sft-steps", "4", "--sft-batch-size", "8", "--sft-lr", "0.01")
KILLED_IN_SFT = """
from retrain_local.backend import LocalBackend
original = LocalBackend.train
def train(self, batch):
    report = original(self, batch)
    if batch.step == -3:
        kill()
    return report
LocalBackend.train = train
"""


def write_chains(file: Path) -> None:
    """Sums of three numbers with their solution, which the embedded model was never taught."""
    rng, seen = random.Random(0), set[tuple[int, ...]]()
    with file.open("w", encoding="utf-8") as stream:
        while len(seen) < 1000:
            a, b, c = terms = tuple(rng.randint(2, 12) for _ in range(3))
            if terms in seen:
                continue
            seen.add(terms)
            solution = f"{a} + {b} = {a + b}, {a + b} + {c} = {a + b + c}. \\boxed{{{a + b + c}}}"
            row = {"prompt": f"What is {a} + {b} + {c}?", "answer": str(a + b + c), "solution": solution}
            stream.write(json.dumps(row) + "\n")


@pytest.mark.long
def test_20_supervised_steps_raise_a_rate_under_5_percent_over_30_and_rl_goes_on(tmp_path: Path) -> None:
    write_chains(tmp_path / "chains.jsonl")
    flags = ["--data-source", "files", "--data-path", "chains.jsonl", "--eval-every", "0", "--save-every", "0"]
    flags += ["--max-tokens", "40", "--lr", "1e-3"]
    tiny(*flags, "--max-steps", "1", "--log-dir", "cold", cwd=tmp_path)
    warm = ["--sft-steps", "20", "--sft-answer", "solution", "--sft-lr", "6e-3"]
    tiny(*flags, *warm, "--max-steps", "20", "--log-dir", "warm", cwd=tmp_path)
    cold, first, last = (
        next(line["eval_correct_rate"] for line in lines if "eval_correct_rate" in line)
        for lines in (
            records(tmp_path / "cold" / "metrics.jsonl"),
            records(tmp_path / "warm" / "metrics.jsonl"),
            reversed(records(tmp_path / "warm" / "metrics.jsonl")),
        )
    )
    assert cold < 0.05
    assert first > 0.30
    assert last > first + 0.1  # measured: 0.016, 0.547, 0.707


@pytest.mark.long
def test_a_kill_within_the_warm_up_changes_nothing(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> None:
    arguments = (*BASE, *SFT, "--max-steps", "1")
    run = killed_and_resumed(tmp_path_factory, "warm up", tmp_path, KILLED_IN_SFT, *arguments)
    found = records(run / "metrics.jsonl")
    losses = [line["sft_loss"] for line in found if line["step"] < -1]
    assert losses == sorted(losses, reverse=True)
