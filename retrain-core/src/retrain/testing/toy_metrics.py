"""Lines of `metrics.jsonl` as a run writes them, for recorders and health monitors."""

from __future__ import annotations

from typing import Any

from retrain.kernel.seeding import Seeds

STEPS = 30


def lines() -> list[dict[str, Any]]:
    """A run that learns, with an initial evaluation, steps that train nothing, and fields that come and go."""
    stream = Seeds(0).stream("conformance metrics")
    made: list[dict[str, Any]] = [{"step": -1, "condition": "toy", "eval_correct_rate": 0.25}]
    for step in range(STEPS):
        line = {
            "step": step,
            "condition": "toy",
            "loss": float(stream.normal()),
            "mean_reward": step / STEPS,
            "correct_rate": step / STEPS,
            "truncation_rate": 0.1,
            "mean_tokens": 40.0 + float(stream.normal()),
            "exec_entropy_mean": 1.0 - step / 100,
            "ratio_max": 1.0,
            "step_time_s": 0.5,
            "skipped": False,
            "all_wrong_groups": 1,
            "useful_groups": 3,
        }
        if step % 10 == 7:  # nothing to train on
            line |= {"loss": None, "ratio_max": None, "skipped": True}
        if step % 6 == 5:
            del line["exec_entropy_mean"]
        made.append(line)
    return made


def collapsing() -> list[dict[str, Any]]:
    """A run in which everything goes wrong from the start and stays wrong."""
    broken = {
        "truncation_rate": 1.0,
        "correct_rate": 0.0,
        "mean_reward": 0.0,
        "mean_tokens": 4000.0,
        "exec_entropy_mean": 1e-6,
        "ratio_max": 1e6,
        "all_wrong_groups": 4,
        "useful_groups": 0,
    }
    return [line | broken if line["step"] >= STEPS // 2 else line for line in lines()]
