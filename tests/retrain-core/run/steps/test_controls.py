"""Controls of a run: coins, form alone, no update; evaluated by the true verifier and named on every line."""

from types import SimpleNamespace

import numpy as np
import pytest

from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import ConfigError, PluginError
from retrain.kernel.parts import Planned, Sampled
from retrain.kernel.progress import Clock
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Group, Score
from retrain.records.run import Control, control_label, control_of_record
from retrain.run.steps.controls import RANDOM_RATE, control_problems, controlled_sampling
from tests.kit.groups import completion_of


class Reads:
    """A reward that reads the text after `=`."""

    def answer_in(self, text):
        return text.partition("=")[2].strip() or None


class Breaks:
    def answer_in(self, text):
        raise ValueError("cannot")


def sampled(texts, scores, *, epoch=0, groups=1):
    """Groups of these texts and true scores."""
    prompts = [
        Prompt(example=Example(id=f"e{n}", prompt="", reference="8"), tokens_T=np.array([1]), epoch=epoch)
        for n in range(groups)
    ]
    completions = tuple(completion_of(text=text, prompt=1) for text in texts)
    made = [Group(example=p.example, completions=completions, scores=tuple(scores)) for p in prompts]
    return Sampled(prompts=prompts, groups=tuple(made), metrics={"x": 1.0})


def controlled(load, text, given, *, names=("r",), rewards=None):
    """What training sees of `given` under a configuration."""
    config, problems = load(text)
    assert not problems
    verifier = SimpleNamespace(names=tuple(names), rewards=(Reads(),) if rewards is None else rewards)
    task = SimpleNamespace(name="", verifier=verifier, context=SimpleNamespace(config=config))
    sample = controlled_sampling(config, Seeds(3), SimpleNamespace(each=(task,)))(lambda planned, clock: given)
    return sample(Planned(step=0, cursor=0, batch_size=1), Clock())


RANDOM, FORMAT = '[training]\ncontrol = "random_reward"\n', '[training]\ncontrol = "format_only"\n'
RIGHT, WRONG = Score.of(1.0), Score.of(0.0)


def values(found):
    return [score.value for group in found.groups for score in group.scores]


def test_form_pays_for_what_the_verifier_reads_and_every_reward_has_a_coin(load):
    given = sampled(["x = 8", "x = 9", "8", "x ="], [RIGHT, WRONG, WRONG, Score.no_verdict("?")])
    found = controlled(load, FORMAT, given)
    assert values(found) == [1.0, 1.0, 0.0, 0.0]
    assert found.groups[0].raw_scores == found.groups[0].scores  # informative groups are chosen by it, too
    assert found.metrics == {"x": 1.0, "verifier_correct_rate": pytest.approx(1 / 3)}
    weights = "[reward]\nweights = { match = 1.0, math = 0.5 }\n"
    given = sampled(["x = 8", "8"], [RIGHT, WRONG])
    names, rewards = ("match", "math"), (Reads(), Reads())
    found = controlled(load, FORMAT + weights, given, names=names, rewards=rewards)
    assert values(found) == [1.5, 0.0]
    assert found.groups[0].scores[0].parts == {"match": 1.0, "math": 1.0}
    many = controlled(load, RANDOM + weights, sampled(["8"] * 64, [WRONG] * 64), names=names, rewards=rewards)
    assert set(values(many)) == {0.0, 0.5, 1.0, 1.5}


def test_coins_know_nothing_of_the_answers_and_depend_on_example_epoch_and_number_alone(load):
    texts, size = ["x = 8"] * 16, 64
    one = controlled(load, RANDOM, sampled(texts, [RIGHT] * 16, groups=size))
    other = controlled(load, RANDOM, sampled(["8"] * 16, [WRONG] * 16, groups=size))
    assert values(one) == values(other)
    assert abs(np.mean(values(one)) - RANDOM_RATE) < 4 * np.sqrt(RANDOM_RATE * (1 - RANDOM_RATE) / (16 * size))
    assert values(one)[:160] == values(controlled(load, RANDOM, sampled(texts, [RIGHT] * 16, groups=10)))
    assert values(one) != values(controlled(load, RANDOM, sampled(texts, [RIGHT] * 16, groups=size, epoch=1)))
    assert {score.outcome.value for group in one.groups for score in group.scores} == {"scored"}


def test_ordinary_runs_stay_and_records_say_which_control_a_run_was(load):
    given = sampled(["x = 8"], [RIGHT])
    assert controlled(load, "", given) is given
    assert controlled(load, '[training]\ncontrol = "no_update"\n', given) is given
    failed = Sampled(prompts=given.prompts, error=ConfigError())
    assert controlled(load, RANDOM, failed).error is failed.error
    assert control_of_record({"config": {"training": {"control": "no_update"}}}) is Control.NO_UPDATE
    for record in ({}, {"config": 3}, {"config": {"training": {"control": ["x"]}}}, {"config": {"training": {}}}):
        assert control_of_record(record) is None
    assert control_label("maxrl+none", Control.FORMAT_ONLY) == "maxrl+none+format_only"


def test_a_reward_that_reads_no_answer_is_refused_by_name(load):
    with pytest.raises(ConfigError, match="reward 'judge' does not say which answers it can read"):
        controlled(load, FORMAT, sampled(["8"], [WRONG]), names=("judge",), rewards=(object(),))
    with pytest.raises(PluginError, match="answer_in of reward 'mine' raised ValueError: cannot"):
        controlled(load, FORMAT, sampled(["8"], [WRONG]), names=("mine",), rewards=(Breaks(),))
    assert values(controlled(load, RANDOM, sampled(["8"], [WRONG]), names=("judge",), rewards=(object(),)))


@pytest.mark.parametrize(
    ("control", "text", "code"),
    [
        ("random_reward", '[teacher]\nmodel = "big"\n', "config.control-and-teacher"),
        ("format_only", '[reward]\ntype = "none"\n', "reward.judges-nothing"),
        ("format_only", '[environment]\nprovider = "games"\n', "reward.no-answer-form"),
        ("random_reward", '[environment]\nprovider = "games"\n', ""),
        ("no_update", '[teacher]\nmodel = "big"\n', ""),
        ("random_reward", "", ""),
    ],
)
def test_what_cannot_be_controlled_is_told_at_once(load, control, text, code):
    config, problems = load(f'{text}[training]\ncontrol = "{control}"\n')
    assert not problems
    found = [*control_problems(config)]
    assert [problem.code for problem in found] == [code] * bool(code)
    assert all("[training] control" in problem.where and problem.fix for problem in found)
