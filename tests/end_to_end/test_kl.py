"""The KL in the loss does what it is for, on the embedded model: the policy stays nearer to where it began."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.running import records, tiny

STEPS = 120
SIZE = ("--max-steps", str(STEPS), "--batch-size", "2", "--group-size", "8", "--max-tokens", "32", "--lr", "0.003")
PLAIN = ("--advantage-mode", "grpo", "--transform-mode", "none", "--eval-examples", "0", "--save-every", "0")
WITH = ("--kl-coef", "0.1")
# next to nothing, so that every completion is measured and not a sixteenth of them
WITHOUT = ("--kl-coef", "1e-12", "--kl-where", "reward")


def divergence(folder: Path) -> float:
    """Mean over the last half of the steps of the mean k1 per token."""
    lines = [line["kl_k1_mean"] for line in records(folder / "metrics.jsonl") if line["step"] >= STEPS / 2]
    return sum(lines) / len(lines)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_coefficient_of_a_tenth_keeps_the_policy_nearer_on_every_seed(tmp_path: Path) -> None:
    shares = []
    for seed in ("1", "2", "3"):
        for name, keys in (("with", WITH), ("without", WITHOUT)):
            tiny(*SIZE, *PLAIN, *keys, "--seed", seed, "--log-dir", f"{name}_{seed}", cwd=tmp_path)
        shares.append(divergence(tmp_path / f"with_{seed}") / divergence(tmp_path / f"without_{seed}"))
    assert max(shares) < 1.0, shares  # measured: 0.71, 0.87 and 0.83
    assert sum(shares) / 3 < 0.9, shares
