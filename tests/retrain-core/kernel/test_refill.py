"""Steps of another size: `[training] refill` takes further rounds of prompts, a pacer sets and lowers the batch."""

import json
from collections import Counter

import pytest

from tests.kit.overlapped import ACTING, GENERATIONS, act, lines, outcome, steps
from tests.kit.problems import codes_in

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
def run(command, toy_arguments, tmp_path):
    """`run("--refill", "3")`: a short run of the toys on a mix of trivial, impossible and useful tasks."""
    (tmp_path / "mixed.py").write_text(MIXED, encoding="utf-8")
    base = [*toy_arguments, "--reward-type", "mixed.Reward", "--scoring-audit", "off", "--set", "data.options.count=60"]
    base += ["--max-steps", str(STEPS), "--save-every", "2", "--batch-size", str(SIZE), "--group-size", str(GROUP)]
    return lambda *arguments: command(*base, *arguments)


def state(folder):
    content = json.loads((folder / "adapter/final/checkpoint.json").read_text())
    return content.get("state", content)


def cursor(folder):
    """Position of the next prompt in the last checkpoint."""
    return int(state(folder)["progress"]["example_idx"])


def drawn_examples(folder):
    """The examples that a run drew, in order."""
    seen = dict.fromkeys((each["step"], each["group"], each["example_id"]) for each in lines(folder, GENERATIONS))
    return [example for *_, example in seen]


def test_rounds_go_on_until_enough_groups_can_teach(run, tmp_path):
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


def test_where_nothing_is_found_the_step_goes_on_with_what_it_has(run, tmp_path):
    assert run("--refill", "2", "--reward-type", "toy", "--lr", "1e-9", "--group-size", "2").code == 0
    found = steps(tmp_path / "logs/train")
    assert [line["rounds"] for line in found] == [3] * STEPS
    assert any(line["loss"] is None for line in found)
    assert all(line["useful_groups"] < SIZE and line["surplus_groups"] == 0 for line in found)
    assert all(line["drawn_groups"] == 3 * SIZE for line in found)
    untrained = [line for line in found if line["loss"] is None]
    assert all(line["dropped_tokens"] == line["sampled_tokens"] for line in untrained)


@pytest.mark.long
def test_stopped_in_any_round_it_continues_as_the_same_run(run, command, distribution, tmp_path):
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
def test_with_overlap_a_step_draws_on_from_where_the_last_round_ended(run_overlapped, command, tmp_path):
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
        if self.does_not_fit(len(requests)):
            raise OutOfMemoryError(f'{len(requests)} prompts do not fit')
        return self.checked(super().sample(requests, params))
    def does_not_fit(self, count):
        return False
    def checked(self, found):
        return found

class Nan(Counting):
    def checked(self, found):
        if self.calls == 2:
            found[0][0] = replace(found[0][0], logprobs_T=found[0][0].logprobs_T * np.nan)
        return found

class Small(Counting):
    def does_not_fit(self, count):
        return count > 3

class SmallLater(Counting):
    def does_not_fit(self, count):
        return self.calls > 1 and count > 2

class Pacer:
    size = 1
    def __init__(self, context):
        self.seen = []
    def batch_size(self, step):
        return self.size
    def observe(self, view):
        self.seen.append([view.step, view.batch_size, view.out_of_memory, view.sampled_tokens, view.has_trained])
        self.size = self.following(view)
    def following(self, view):
        return view.batch_size - 1 if view.out_of_memory else view.batch_size + 1
    def metrics(self):
        return {'bp_action': 'increase', 'bp_seen': len(self.seen)}
    def state(self):
        return {'size': self.size, 'seen': self.seen}
    def restore(self, state):
        self.size, self.seen = state['size'], state['seen']

class Halving(Pacer):
    size = 4
    def following(self, view):
        return 2 if view.out_of_memory else self.size

class Greedy(Pacer):
    def following(self, view):
        return 5

class Idle(Pacer):
    size = 0
"""


def on(name):
    return ("--bp-enabled", "--bp-pacer", f"refilled.{name}")


def test_a_round_that_cannot_be_sampled_rejects_the_step_and_passes_over_its_prompts(run, tmp_path):
    (tmp_path / "refilled.py").write_text(TOYS)
    assert run(*REFILL, "--backend", "refilled.Nan", "--set", "backend.options={}").code == 0
    found = steps(tmp_path / "logs/train")
    assert "not finite" in found[0]["rejected"]
    assert not any("rejected" in line for line in found[1:])
    drawn = sum(line["drawn_groups"] for line in found[1:])
    assert cursor(tmp_path / "logs/train") == 2 * SIZE + drawn  # the first step's two rounds are spent


def test_out_of_memory_in_a_later_round_takes_the_step_again_with_fewer_prompts(run, tmp_path):
    (tmp_path / "refilled.py").write_text(TOYS)
    paced = (*on("Halving"), "--backend", "refilled.SmallLater", "--set", "backend.options={}")
    assert run(*REFILL, *paced).code == 0
    found = steps(tmp_path / "logs/train")
    assert [(line["batch_size"], line["useful_groups"]) for line in found] == [(2, 2)] * STEPS
    assert cursor(tmp_path / "logs/train") == sum(line["drawn_groups"] for line in found)
    seen = state(tmp_path / "logs/train")["pacer"]["seen"]
    assert seen[0][:4] == [0, 4, True, 0]
    assert [each[3] for each in seen[1:]] == [line["sampled_tokens"] for line in found]  # throughput counts all


@pytest.fixture
def run_paced(command, toy_arguments, tmp_path):
    (tmp_path / "refilled.py").write_text(TOYS)
    return lambda *arguments: command(*toy_arguments, "--max-steps", "4", "--save-every", "2", *arguments)


def test_the_pacer_sees_every_step_and_a_step_that_does_not_fit_is_tried_again(run_paced, tmp_path):
    result = run_paced(*on("Pacer"), "--backend", "refilled.Small")
    assert result.code == 0, result.err
    found, rows = lines(tmp_path / "logs/train"), state(tmp_path / "logs/train")["pacer"]["seen"]
    assert [line["step"] for line in found] == [0, 1, 2, 3]
    assert [line["batch_size"] for line in found] == [1, 2, 3, 3]
    assert [line["bp_seen"] for line in found] == [1, 2, 3, 5]
    tried_again = [[3, 4, True], [3, 3, False]]
    assert [row[:3] for row in rows] == [[0, 1, False], [1, 2, False], [2, 3, False], *tried_again]
    done = [row for row in rows if not row[2]]
    assert [row[3] for row in done] == [line["sampled_tokens"] for line in found]
    assert [row[4] for row in done] == [line["num_datums"] > 0 for line in found]
    assert json.loads((tmp_path / "logs/train/trainer_state.json").read_text())["current_batch_size"] == 4
    assert "the same seed does not give the same run" in result.out + result.err


@pytest.mark.long
def test_a_resumed_run_continues_with_the_pacers_state(run_paced, tmp_path):
    assert run_paced(*on("Pacer"), "--max-steps", "2").code == 0
    result = run_paced(*on("Pacer"), "--resume", "logs/train")
    assert result.code == 0, result.err
    assert [line["batch_size"] for line in lines(tmp_path / "logs/train")] == [1, 2, 3, 4]
    assert [row[0] for row in state(tmp_path / "logs/train")["pacer"]["seen"]] == [0, 1, 2, 3]


@pytest.mark.parametrize("pacer", [(), on("Greedy")], ids=["none", "one that does not back off"])
def test_without_anything_smaller_to_try_the_run_ends_with_the_error(pacer, run_paced, tmp_path):
    result = run_paced(*pacer, "--backend", "refilled.Small", "--batch-size", "4")
    assert result.code == 1
    assert "prompts do not fit" in result.err
    assert "Traceback" not in result.err


@pytest.mark.parametrize(("pacer", "code"), [("refilled.Idle", "plugin.bad-batch-size"), ("usk", "plugin.missing")])
def test_a_pacer_that_wants_nothing_or_does_not_exist_is_refused(run_paced, pacer, code):
    result = run_paced("--bp-enabled", "--bp-pacer", pacer)
    assert (result.code, codes_in(result.err)) == (2, [code])
