"""`[training] refill`, measured: with trivial and impossible tasks among them nearly all steps train a full batch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.end_to_end.running import records, retrain

REWARD = """
class Reward:
    def __init__(self, context):
        pass
    def score(self, example, text):
        if example.reference in ("any", "never"):
            return float(example.reference == "any")
        return float(text.strip().rstrip(".}$ ").endswith(example.reference))
"""
STEPS, SIZE = 20, 4
RUN = ("--model", "builtin:tiny", "--backend", "local", "--devices", "cpu", "--advantage-mode", "grpo", "--seed", "1")
RUN += ("--transform-mode", "none", "--max-steps", str(STEPS), "--batch-size", str(SIZE), "--group-size", "8")
RUN += ("--max-tokens", "32", "--temperature", "1.0", "--lr", "1e-4", "--save-every", "0", "--data-source", "files")
RUN += ("--data-path", "mixed.jsonl", "--reward-type", "mixed.Reward", "--scoring-audit", "off")


def tasks() -> list[dict[str, str]]:
    """Sums of which about a third each is right whatever is answered, wrong whatever is answered, and as it is."""
    sums = [(a, b) for a in range(2, 10) for b in range(2, 10)]
    return [{"prompt": f"What is {a} + {b}?", "answer": ("any", "never", str(a + b))[(3 * a + b) % 3]} for a, b in sums]


@pytest.mark.long
def test_refill_fills_nearly_every_step_and_records_what_it_costs(tmp_path: Path) -> None:
    (tmp_path / "mixed.py").write_text(REWARD, encoding="utf-8")
    (tmp_path / "mixed.jsonl").write_text("\n".join(map(json.dumps, tasks())), encoding="utf-8")
    found: dict[str, list[dict[str, Any]]] = {}
    for refill in ("0", "8"):
        outcome = retrain(*RUN, "--refill", refill, "--log-dir", refill, cwd=tmp_path)
        assert outcome.code == 0, outcome.err
        found[refill] = records(tmp_path / refill / "metrics.jsonl")
    full = {name: sum(line["useful_groups"] == SIZE for line in found[name]) / STEPS for name in found}
    assert full["0"] < 0.5
    assert full["8"] > 0.95
    generations = records(tmp_path / "8/emergence/generations.jsonl")
    tokens = {name: sum(line["sampled_tokens"] for line in found[name]) for name in found}
    assert tokens["8"] == sum(each["num_tokens"] for each in generations) > tokens["0"]
    dropped = sum(line["dropped_tokens"] for line in found["8"])
    assert dropped == sum(each["num_tokens"] for each in generations if not each["trained"])
    print(f"full steps {full}, tokens {tokens}, of which dropped {dropped}")
