"""Runs of every arrangement that are killed in a bad place: resumed, they are the run that was left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.records.checkpoints import newest_valid
from tests.end_to_end.killing import BASE, check_same, finish, killed_and_resumed, left_alone, start, wait_for
from tests.end_to_end.running import records, retrain

pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]

TRAINED = """
from retrain_local.backend import LocalBackend
at(LocalBackend, "train", kill, lambda _, batch: {when}, after=True)
"""
TRAINING = """
from retrain_local.training.trainer import Trainer
at(Trainer, "accumulate", kill, lambda _, batch: batch.step == {step})
"""
DRAWING = """
from retrain.run.steps.learned_order import LearnedOrder
at(LearnedOrder, "draw", kill, lambda _, cursor, count, step: step == {step})
"""
SAMPLING = """
from retrain.run.steps.overlapped import Buffered
at(Buffered, "_sample_with", kill, lambda _, version, planned: planned.step == {step})
"""
# Asks the process to stop while step 3 is trained, once the prompts of step 4 are chosen.
STOPPED = """
from retrain.run.steps.learned_order import LearnedOrder
from retrain_local.training.trainer import Trainer
drawn = set()
def stop(*_):
    while 4 not in drawn:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.5)
at(LearnedOrder, "draw", lambda *args: drawn.add(args[-1]), after=True)
at(Trainer, "accumulate", stop, lambda _, batch: batch.step == 3)
"""
SPLIT = ("--devices", "cpu,cpu")
AHEAD = (*BASE, *SPLIT, "--max-staleness", "2")
THOMPSON = {
    name: (*BASE, "--data-sampler", "thompson", *flags)
    for name, flags in (
        ("in-turn", ("--refill", "1")),
        ("overlapped", SPLIT),
        ("ahead", (*SPLIT, "--max-staleness", "2")),
    )
}
UPDATES = (
    *(*BASE, "--minibatches", "4", "--epochs", "2", "--loss", "ppo", "--optim-schedule", "cosine"),
    *("--optim-warmup-steps", "1", "--tis-cap", "2", "--max-steps", "3", "--eval-examples", "0"),
)
DISTILLING = (
    *("--max-steps", "3", "--save-every", "1", "--batch-size", "4", "--group-size", "8", "--max-tokens", "24"),
    *("--advantage-mode", "distillation", "--transform-mode", "none", "--reward-type", "none", "--eval-examples", "0"),
    *("--teacher-model", "builtin:tiny", "--seed", "3", "--kl-coef", "0.01", "--sepa-delay-steps", "1"),
)
WARM_UP = (*BASE, "--sft-steps", "4", "--sft-batch-size", "8", "--sft-lr", "0.01", "--max-steps", "1")


@pytest.fixture
def lines(tmp_path_factory: pytest.TempPathFactory, tmp_path: Path) -> Any:
    """`lines(name, patch, flags)`: the metrics of a run that was killed and resumed in `tmp_path / "killed"`."""

    def call(name: str, patch: str, flags: tuple[str, ...]) -> list[dict[str, Any]]:
        run = killed_and_resumed(tmp_path_factory, name, tmp_path, patch, *flags)
        return records(run / "metrics.jsonl")

    return call


@pytest.mark.parametrize(
    ("arrangement", "patch", "step"),
    [
        *(("ahead", TRAINING, 3), ("ahead", DRAWING, 5), ("in-turn", TRAINING, 3), ("in-turn", DRAWING, 5)),
        *(("overlapped", DRAWING, 4), ("overlapped", TRAINING, 4)),
    ],
)
def test_a_killed_run_chooses_the_prompts_that_it_would_have_chosen(
    arrangement: str, patch: str, step: int, lines: Any, tmp_path: Path
) -> None:
    found = lines(f"thompson-{arrangement}", patch.replace("{step}", str(step)), THOMPSON[arrangement])
    steps = [line for line in found if line["step"] >= 0]
    assert {line["sampler"] for line in steps} == {"thompson"}
    drawn = {(each["step"], each["example_id"]) for each in records(tmp_path / "killed/emergence/generations.jsonl")}
    assert len(drawn) == sum(line.get("drawn_groups", line["batch_size"]) for line in steps)  # none twice in a step


@pytest.mark.parametrize("arrangement", ["overlapped", "ahead"])
def test_a_run_that_is_stopped_while_later_prompts_are_chosen_chooses_them_again(
    arrangement: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    flags = THOMPSON[arrangement]
    wanted = left_alone(tmp_path_factory, f"thompson-{arrangement}", *flags)
    (tmp_path / "retrain.toml").write_bytes((wanted / "retrain.toml").read_bytes())
    code, _, err = finish(start(*flags, "--log-dir", "stopped", cwd=tmp_path, patch=STOPPED))
    assert code == 75, err
    assert len(records(tmp_path / "stopped/metrics.jsonl")) == 4  # steps 0 to 2, after the evaluation before them
    code, _, err = finish(start("--resume", "stopped", cwd=tmp_path))
    assert code == 0, err
    check_same(tmp_path / "stopped", wanted / "never")


@pytest.mark.parametrize(("patch", "step"), [(TRAINING, 3), (SAMPLING, 4), (SAMPLING, 1), (TRAINING, 5)])
def test_two_steps_ahead_each_step_is_sampled_with_the_policy_that_it_had(
    patch: str, step: int, lines: Any, tmp_path: Path
) -> None:
    found = lines("ahead", patch.replace("{step}", str(step)), AHEAD)
    assert [line["staleness_max"] for line in found if line["step"] >= 0] == [0, 1, 2, 2, 2, 2]
    versions = {(r["step"], r["policy_version"]) for r in records(tmp_path / "killed/emergence/generations.jsonl")}
    assert versions == {(0, 0), (1, 0), (2, 0), (3, 1), (4, 2), (5, 3)}


def test_between_two_updates_of_a_batch(lines: Any) -> None:
    found = lines("updates", TRAINED.replace("{when}", "(batch.step, batch.update) == (1, 1)"), UPDATES)
    found = [line for line in found if line["step"] >= 0]
    assert max(line["updates"] for line in found) >= 4
    assert [line["lr"] for line in found] == pytest.approx([3e-3, 3e-3, 1.5e-3])


def test_within_the_supervised_warm_up(lines: Any) -> None:
    found = lines("warm up", TRAINED.replace("{when}", "batch.step == -3"), WARM_UP)
    losses = [line["sft_loss"] for line in found if line["step"] < -1]
    assert losses == sorted(losses, reverse=True)


def test_in_a_distillation_which_reports_no_verdict(lines: Any, tmp_path: Path) -> None:
    found = lines("distillation", TRAINED.replace("{when}", "batch.step == 1"), DISTILLING)
    assert len(found) == 3
    assert found[0]["teacher_kl_mean"] < 1e-6 < found[2]["kl_mean"], "the teacher is what the student began as"
    for line in found:
        assert (line["useful_groups"], line["batch_size"], line["num_datums"]) == (4, 4, 32)
        assert not {"correct_rate", "running_correct_rate", "mean_reward", "no_verdict_count", "health"} & line.keys()
    for command in (("status", "killed"), ("report", "killed"), ("compare", "killed", "killed")):
        done = retrain(*command, cwd=tmp_path)
        assert done.code == 0, (command, done.err)


def test_under_back_pressure_it_goes_on_with_what_it_had_measured(tmp_path: Path) -> None:
    assert retrain("init", "--template", "tiny", cwd=tmp_path).code == 0
    size = ("--batch-size", "3", "--group-size", "8", "--max-tokens", "24", "--save-every", "1", "--eval-examples", "0")
    pressure = ("--bp-enabled", "--bp-warmup-steps", "6", "--bp-max-batch-size", "16", "--max-steps", "12")
    run = tmp_path / "run"
    process = start(*pressure, *size, "--log-dir", str(run), cwd=tmp_path)
    wait_for(process, run / "adapter/checkpoint_step_8")
    process.kill()
    finish(process)
    before, _ = newest_valid(run / "adapter")
    assert before is not None
    state = before.state["pacer"]
    assert state["steps"] == before.next_step >= 8

    code, _, err = finish(start("--resume", str(run), cwd=tmp_path))
    assert code == 0, err
    found = records(run / "metrics.jsonl")
    assert [line["step"] for line in found] == list(range(12))
    assert [line["batch_size"] for line in found[:6]] == [1, 2, 4, 8, 16, 1]
    assert [line["bp_warmup"] for line in found] == [True] * 6 + [False] * 6
    assert found[before.next_step]["batch_size"] == state["batch_size"]
    assert "bp_throughput" in found[-1]
    after, _ = newest_valid(run / "adapter")
    assert after is not None
    assert after.state["pacer"]["samples"][: len(state["samples"])] == state["samples"]
    assert after.state["pacer"]["steps"] == 12
