"""Runs whose prompts `thompson` chooses: killed and resumed to the same bytes, in each arrangement of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.killing import BASE, killed_and_resumed
from tests.end_to_end.running import records

pytestmark = pytest.mark.timeout(900)

THOMPSON = (*BASE, "--data-sampler", "thompson")
SPLIT = ("--devices", "cpu,cpu")
ARRANGEMENTS = {
    "in-turn": ("--refill", "1"),
    "overlapped": SPLIT,
    "ahead": (*SPLIT, "--max-staleness", "2"),
}
# Kills the process when the prompts of a step are chosen, or when the step is about to be trained.
KILLED = """
from retrain.rooms.session.steps.sampling_order import SamplingOrder
from retrain_local.training.trainer import Trainer

def at(owner, name, is_time):
    original = getattr(owner, name)
    def call(*args, **more):
        if is_time(*args):
            kill()
        return original(*args, **more)
    setattr(owner, name, call)

at(SamplingOrder, "draw", lambda _, cursor, count, step: {half!r} == "drawing" and step == {step})
at(Trainer, "accumulate", lambda _, batch: {half!r} == "training" and batch.step == {step})
"""
MORE = [
    ("in-turn", "training", 3),
    ("in-turn", "drawing", 5),
    ("overlapped", "drawing", 4),
    ("overlapped", "training", 4),
]
CASES = [
    pytest.param("ahead", "training", 3, marks=pytest.mark.slow),
    *(pytest.param(*case, marks=pytest.mark.long) for case in [*MORE, ("ahead", "drawing", 5)]),
]


@pytest.mark.parametrize(("arrangement", "half", "step"), CASES)
def test_a_killed_run_chooses_the_prompts_that_it_would_have_chosen(
    arrangement: str, half: str, step: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    patch = KILLED.replace("{half!r}", repr(half)).replace("{step}", str(step))
    flags = (*THOMPSON, *ARRANGEMENTS[arrangement])
    run = killed_and_resumed(tmp_path_factory, f"thompson-{arrangement}", tmp_path, patch, *flags)
    steps = [line for line in records(run / "metrics.jsonl") if line["step"] >= 0]
    assert {line["sampler"] for line in steps} == {"thompson"}
    drawn = {(each["step"], each["example_id"]) for each in records(run / "emergence/generations.jsonl")}
    assert len(drawn) == sum(line.get("drawn_groups", line["batch_size"]) for line in steps)  # none twice in a step
