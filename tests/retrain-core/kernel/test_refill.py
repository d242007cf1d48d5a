"""`[training] refill`: further rounds of prompts until enough groups can teach, what is recorded of it, and resumes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.kit.overlapped import ACTING, GENERATIONS, act, lines, outcome, steps

Command = Callable[..., Any]
Run = Callable[..., Any]
STEPS, SIZE, GROUP = 6, 4, 4
# A third of the tasks is always right, a third never; the others are right when the answer has an odd first number.
MIXED = """
class Reward:
    def __init__(self, context):
        pass
    def score(self, example, text):
        kind = int(example.id.split("-")[2]) % 3
        if kind < 2:
            return float(kind)
        return float(sum(map(ord, text)) % 2)
"""
REFILL = ("--refill", "9")


@pytest.fixture
def run(command: Command, toy_arguments: list[str], tmp_path: Path) -> Run:
    """`run("--refill", "3")`: a short run of the toys on a mix of trivial, impossible and useful tasks."""
    (tmp_path / "mixed.py").write_text(MIXED, encoding="utf-8")
    base = [*toy_arguments, "--reward-type", "mixed.Reward", "--scoring-audit", "off", "--set", "data.options.count=60"]
    base += ["--max-steps", str(STEPS), "--save-every", "2", "--batch-size", str(SIZE), "--group-size", str(GROUP)]
    return lambda *arguments: command(*base, *arguments)


def state(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "adapter/final/checkpoint.json").read_text())
    found: dict[str, Any] = content.get("state", content)
    return found


def cursor(folder: Path) -> int:
    """Position of the next prompt in the last checkpoint."""
    return int(state(folder)["progress"]["example_idx"])


def drawn_examples(folder: Path) -> list[str]:
    """The examples that a run drew, in order."""
    seen = dict.fromkeys((each["step"], each["group"], each["example_id"]) for each in lines(folder, GENERATIONS))
    return [example for *_, example in seen]


def test_rounds_go_on_until_enough_groups_can_teach(run: Run, tmp_path: Path) -> None:
    assert run("--log-dir", "plain").code == 0
    result = run("--log-dir", "filled", *REFILL)
    assert (result.code, result.err) == (0, "")
    plain, filled = steps(tmp_path / "plain"), steps(tmp_path / "filled")
    assert sum(line["useful_groups"] == SIZE for line in plain) < STEPS / 2
    fields = {name for line in plain for name in line}
    assert fields.isdisjoint(("rounds", "drawn_groups", "surplus_groups", "dropped_tokens"))
    generations = lines(tmp_path / "filled", GENERATIONS)
    for line in filled:
        mine = [each for each in generations if each["step"] == line["step"]]
        assert line["useful_groups"] == line["batch_size"] == SIZE
        assert line["num_datums"] == SIZE * GROUP == sum(each["trained"] for each in mine)
        assert line["drawn_groups"] == SIZE * line["rounds"] == len({each["group"] for each in mine})
        causes = ("useful", "all_right", "all_wrong", "tied", "no_verdict", "surplus")
        assert sum(line[f"{cause}_groups"] for cause in causes) == line["drawn_groups"]
        assert line["sampled_tokens"] == sum(each["num_tokens"] for each in mine)
        assert line["dropped_tokens"] == sum(each["num_tokens"] for each in mine if not each["trained"])
        assert Counter(each.get("round", 0) for each in mine) == dict.fromkeys(range(line["rounds"]), SIZE * GROUP)
        trained = [each["group"] for each in mine if each["trained"]]
        able = sorted(
            {each["group"] for each in mine if len({e["reward"] for e in mine if e["group"] == each["group"]}) > 1}
        )
        assert sorted(set(trained)) == able[:SIZE]  # the first ones, in order; what comes after is surplus
        assert line["surplus_groups"] == len(able) - SIZE
        # Rates are over the prompts that no outcome has selected: those of the first round.
        first = [each for each in mine if not each.get("round")]
        assert line["correct_rate"] == pytest.approx(sum(each["reward"] for each in first) / len(first))
        assert line["mean_tokens"] == pytest.approx(sum(each["num_tokens"] for each in first) / len(first))
    first = [each for each in generations if not each.get("round")]
    assert filled[-1]["running_correct_rate"] == pytest.approx(sum(each["reward"] for each in first) / len(first))
    drawn = sum(line["drawn_groups"] for line in filled)
    assert (cursor(tmp_path / "plain"), cursor(tmp_path / "filled")) == (STEPS * SIZE, drawn)
    # The same seeded order, one prompt after another: a run without refill begins with the same prompts.
    before = drawn_examples(tmp_path / "plain")
    assert drawn_examples(tmp_path / "filled")[: len(before)] == before


def test_where_nothing_is_found_the_step_goes_on_with_what_it_has(run: Run, tmp_path: Path) -> None:
    assert run("--refill", "2", "--reward-type", "toy", "--lr", "1e-9", "--group-size", "2").code == 0
    found = steps(tmp_path / "logs/train")
    assert [line["rounds"] for line in found] == [3] * STEPS
    assert any(line["loss"] is None for line in found)
    assert all(line["useful_groups"] < SIZE and line["surplus_groups"] == 0 for line in found)
    assert all(line["drawn_groups"] == 3 * SIZE for line in found)
    untrained = [line for line in found if line["loss"] is None]
    assert all(line["dropped_tokens"] == line["sampled_tokens"] for line in untrained)


@pytest.mark.long
def test_stopped_in_any_round_it_continues_as_the_same_run(
    run: Run, command: Command, distribution: Callable[..., Path], tmp_path: Path
) -> None:
    assert run("--log-dir", "never", *REFILL).code == 0
    rounds = [line["rounds"] for line in steps(tmp_path / "never")]
    step = max(range(STEPS), key=lambda number: (rounds[number] > 2, number))
    assert rounds[step] > 2, rounds
    distribution("retrain-acting", {"acting": ACTING})
    for phase, passed in (("sampling", 1), ("scoring", 2), ("training", 0), ("recording", 0)):
        act(tmp_path, phase, step, passed=passed)
        stopped = f"{phase}_{passed}"
        assert run("--log-dir", stopped, *REFILL).code == 75
        assert command("--resume", stopped).code == 0
        assert outcome(tmp_path / stopped) == outcome(tmp_path / "never"), stopped


@pytest.mark.long
def test_with_overlap_a_step_draws_on_from_where_the_last_round_ended(
    run_overlapped: Run, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "mixed.py").write_text(MIXED, encoding="utf-8")
    more = ("--reward-type", "mixed.Reward", "--set", "data.options.count=60", "--eval-examples", "2")
    more += ("--eval-every", "2")
    assert run_overlapped("--log-dir", "never", *more, *REFILL).code == 0
    found = steps(tmp_path / "never")
    assert max(line["rounds"] for line in found) > 1
    assert [line["staleness_mean"] for line in found] == [0, 1, 1, 1, 1]
    assert [line["toy_drawn"] for line in found] == [4 * line["rounds"] for line in found]
    epoch = drawn_examples(tmp_path / "never")[:58]
    assert len(set(epoch)) == len(epoch)  # no prompt is passed over, none comes twice in an epoch
    assert run_overlapped("--log-dir", "cut", *more, *REFILL, "--max-steps", "3", "--save-every", "3").code == 0
    assert command("--resume", "cut", "--max-steps", "5").code == 0
    assert outcome(tmp_path / "cut")[1:] == outcome(tmp_path / "never")[1:]


TOYS = """
from dataclasses import replace
import numpy as np
from retrain.api import OutOfMemoryError
from toy_parts import Options, ToyBackend

class Counting(ToyBackend):
    calls = 0
    def __init__(self, context):
        super().__init__(replace(context, params=Options()))
    def sample(self, requests, params):
        self.calls += 1
        return self.checked(requests, super().sample(requests, params))

class Nan(Counting):
    def checked(self, requests, found):
        if self.calls == 2:
            found[0][0] = replace(found[0][0], logprobs_T=found[0][0].logprobs_T * np.nan)
        return found

class Small(Counting):
    def checked(self, requests, found):
        if self.calls > 1 and len(requests) > 2:
            raise OutOfMemoryError('too many prompts')
        return found

class Pacer:
    def __init__(self, context):
        self.size, self.seen = 4, []
    def batch_size(self, step):
        return self.size
    def observe(self, view):
        self.seen.append([view.step, view.batch_size, view.out_of_memory, view.sampled_tokens])
        self.size = 2 if view.out_of_memory else self.size
    def metrics(self):
        return {'bp_seen': len(self.seen)}
    def state(self):
        return {'size': self.size, 'seen': self.seen}
"""


def test_a_round_that_cannot_be_sampled_rejects_the_step_and_passes_over_its_prompts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "refilled.py").write_text(TOYS)
    assert run(*REFILL, "--backend", "refilled.Nan", "--set", "backend.options={}").code == 0
    found = steps(tmp_path / "logs/train")
    assert "not finite" in found[0]["rejected"]
    assert not any("rejected" in line for line in found[1:])
    drawn = sum(line["drawn_groups"] for line in found[1:])
    assert cursor(tmp_path / "logs/train") == 2 * SIZE + drawn  # the first step's two rounds are spent


def test_out_of_memory_in_a_later_round_takes_the_step_again_with_fewer_prompts(run: Run, tmp_path: Path) -> None:
    (tmp_path / "refilled.py").write_text(TOYS)
    paced = ("--bp-enabled", "--bp-pacer", "refilled.Pacer", "--backend", "refilled.Small")
    assert run(*REFILL, *paced, "--set", "backend.options={}").code == 0
    found = steps(tmp_path / "logs/train")
    assert [(line["batch_size"], line["useful_groups"]) for line in found] == [(2, 2)] * STEPS
    assert cursor(tmp_path / "logs/train") == sum(line["drawn_groups"] for line in found)
    seen = state(tmp_path / "logs/train")["pacer"]["seen"]
    assert seen[0] == [0, 4, True, 0]
    assert [each[3] for each in seen[1:]] == [line["sampled_tokens"] for line in found]  # throughput counts all
