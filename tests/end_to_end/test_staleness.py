"""Sampling two steps ahead on the built-in model: a killed run is resumed to the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.killing import BASE, killed_and_resumed
from tests.end_to_end.running import records
from tests.shared import slow_or_long

pytestmark = pytest.mark.timeout(900)

AHEAD = (*BASE, "--devices", "cpu,cpu", "--max-staleness", "2")
# Kills the process at a step, in the thread that samples or in the one that trains.
KILLED = """
from retrain.rooms.session.steps.buffered import Buffered
from retrain_local.training.trainer import Trainer

def at(owner, name, is_time):
    original = getattr(owner, name)
    def call(*args, **more):
        if is_time(*args):
            kill()
        return original(*args, **more)
    setattr(owner, name, call)

at(Buffered, "_sample_with", lambda _, version, planned: {half!r} == "sampling" and planned.step == {step})
at(Trainer, "accumulate", lambda _, batch: {half!r} == "training" and batch.step == {step})
"""


@pytest.mark.parametrize(
    ("half", "step"), slow_or_long([("training", 3), ("sampling", 4), ("sampling", 1), ("training", 5)])
)
def test_a_killed_run_continues_with_the_policies_that_its_steps_are_sampled_with(
    half: str, step: int, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    patch = KILLED.replace("{half!r}", repr(half)).replace("{step}", str(step))
    run = killed_and_resumed(tmp_path_factory, "ahead", tmp_path, patch, *AHEAD)
    steps = [line for line in records(run / "metrics.jsonl") if line["step"] >= 0]
    assert [line["staleness_max"] for line in steps] == [0, 1, 2, 2, 2, 2]
    versions = {(r["step"], r["policy_version"]) for r in records(run / "emergence/generations.jsonl")}
    assert versions == {(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3)}
