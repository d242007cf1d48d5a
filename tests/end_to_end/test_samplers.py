"""Runs whose prompts `thompson` chooses: killed and resumed to the same bytes, in each arrangement of a step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.end_to_end.killing import BASE, check_same, finish, killed_and_resumed, left_alone, start
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
from retrain.run.steps.learned_order import LearnedOrder
from retrain_local.training.trainer import Trainer

def at(owner, name, is_time):
    original = getattr(owner, name)
    def call(*args, **more):
        if is_time(*args):
            kill()
        return original(*args, **more)
    setattr(owner, name, call)

at(LearnedOrder, "draw", lambda _, cursor, count, step: {half!r} == "drawing" and step == {step})
at(Trainer, "accumulate", lambda _, batch: {half!r} == "training" and batch.step == {step})
"""
# Asks the process to stop while step 3 is trained, once the prompts of step 4 are chosen.
STOPPED = """
import time
from retrain.run.steps.learned_order import LearnedOrder
from retrain_local.training.trainer import Trainer

drawn, draw, accumulate = set(), LearnedOrder.draw, Trainer.accumulate
def tell(self, cursor, count, step):
    prompts = draw(self, cursor, count, step)
    drawn.add(step)
    return prompts
def stop(self, batch):
    if batch.step == 3:
        while 4 not in drawn:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.5)
    return accumulate(self, batch)
LearnedOrder.draw, Trainer.accumulate = tell, stop
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


@pytest.mark.long
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


@pytest.mark.long
@pytest.mark.parametrize("arrangement", ["overlapped", "ahead"])
def test_a_run_that_is_stopped_while_later_prompts_are_chosen_chooses_them_again(
    arrangement: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = (*THOMPSON, *ARRANGEMENTS[arrangement])
    wanted = left_alone(tmp_path_factory, f"thompson-{arrangement}", *flags)
    (tmp_path / "retrain.toml").write_bytes((wanted / "retrain.toml").read_bytes())
    code, _, err = finish(start(*flags, "--log-dir", "stopped", cwd=tmp_path, patch=STOPPED))
    assert code == 75, err
    assert len(records(tmp_path / "stopped/metrics.jsonl")) == 4  # steps 0 to 2, after the evaluation before them
    code, _, err = finish(start("--resume", "stopped", cwd=tmp_path))
    assert code == 0, err
    check_same(tmp_path / "stopped", wanted / "never")
