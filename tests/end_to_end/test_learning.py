"""The main job, measured: the embedded model learns its home task, for every seed and every condition."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.running import records, tiny

LATER = (("maxrl", "none"), ("maxrl", "gtpo"), ("maxrl", "gtpo_hicra"))
CONDITIONS = (("grpo", "none"), *(pytest.param(*each, marks=pytest.mark.long) for each in LATER))
BEFORE = (0.35, 0.60)


def held_out(folder: Path) -> tuple[float, float]:
    """Correct rate on held-out examples before the first and after the last step."""
    rates = [r["eval_correct_rate"] for r in records(folder / "logs/tiny/metrics.jsonl") if "eval_correct_rate" in r]
    return rates[0], rates[-1]


@pytest.mark.long  # seed 1 at every change: `nox -s quickstart` trains it, and fails unless it learns as much
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_full_pipeline_learns_for_every_seed(seed: int, tmp_path: Path) -> None:
    tiny("--seed", str(seed), cwd=tmp_path)
    before, after = held_out(tmp_path)
    assert BEFORE[0] <= before <= BEFORE[1]
    assert after >= 0.85


@pytest.mark.slow
def test_all_weights_learn(tmp_path: Path) -> None:
    """Six steps of full fine-tuning, which a model of transformers remains of."""
    size = ("--max-steps", "6", "--save-every", "1", "--eval-every", "6")
    tiny("--seed", "1", "--lora-rank", "0", "--lr", "1e-3", *size, cwd=tmp_path)
    before, after = held_out(tmp_path)
    assert before + 0.2 < after
    kept = {folder.name for folder in (tmp_path / "logs/tiny/adapter").iterdir() if (folder / "config.json").is_file()}
    assert kept == {"final", "checkpoint_step_4", "checkpoint_step_5"}


@pytest.mark.long
@pytest.mark.parametrize("kind", ["nf4", "int8"])
def test_an_adapter_on_quantised_weights_learns(kind: str, tmp_path: Path) -> None:
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    tiny("--seed", "1", "--quantize", kind, "--max-steps", "30", "--eval-every", "30", cwd=tmp_path)
    before, after = held_out(tmp_path)
    assert before + 0.2 < after
    gaps = [record["logprob_gap_max"] for record in records(tmp_path / "logs/tiny/metrics.jsonl") if "loss" in record]
    assert max(gaps) < 1e-4


@pytest.mark.long
@pytest.mark.parametrize(("advantage", "transform"), CONDITIONS)
def test_every_other_condition_learns_too(advantage: str, transform: str, tmp_path: Path) -> None:
    tiny("--seed", "1", "--advantage-mode", advantage, "--transform-mode", transform, cwd=tmp_path)
    _, after = held_out(tmp_path)
    assert after > 0.80
