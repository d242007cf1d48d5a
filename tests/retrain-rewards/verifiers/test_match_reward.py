from __future__ import annotations

import pytest

from retrain.api import Config, Example, Kind, PluginContext, Plugins, Reward, Score, Seeds, resolve
from retrain_rewards.tables import RewardTable
from retrain_rewards.verifiers.match import last_number
from tests.kit.problems import refused
from tests.kit.tables import pairs


def make(plugins: Plugins, **keys: object) -> Reward:
    context = PluginContext(config=Config(tables={"reward": RewardTable(**keys)}), seeds=Seeds(0), plugins=plugins)
    made: Reward = resolve(plugins, Kind.REWARD, "match", where="test").target(context)
    return made


@pytest.fixture
def reward(plugins: Plugins) -> Reward:
    return make(plugins)


@pytest.fixture
def reads_numbers(plugins: Plugins) -> Reward:
    return make(plugins, answer="last_number")


def example(reference: str) -> Example:
    return Example(id="e", prompt="p", reference=reference)


EQUAL = [*pairs(r"5 => \boxed{5}  nan => \boxed{nan}"), (" 5 ", r"\boxed{ 5}"), ("a  b", "\\boxed{a\n b}")]
OTHER = pairs(
    r"5 => \boxed{6}  5 => \boxed{5} no, \boxed{6}  5 => \boxed{5  5 => 5  5 =>  5 => \boxed{}  0.5 => \boxed{1/2}"
)


@pytest.mark.parametrize(("reference", "text"), [*EQUAL, *OTHER])
def test_equal_as_text(reward: Reward, reference: str, text: str) -> None:
    score = reward.score(example(reference), text)
    assert score == Score.of(float((reference, text) in EQUAL))


@pytest.mark.parametrize("reference", ["", " \n"])
@pytest.mark.parametrize("text", ["", r"\boxed{}", "silence"])
def test_an_empty_reference_is_never_a_free_point(reward: Reward, reference: str, text: str) -> None:
    assert refused(reward.score, example(reference), text) == ["reward.no-reference"]


@pytest.mark.parametrize("reference", ["5", " 5 ", "a  b", r"\{1\}", r"\frac{1}{2}", "nan"])
def test_gold_scores_one(reward: Reward, reference: str) -> None:
    text = reward.gold(example(reference))  # type: ignore[attr-defined]
    assert reward.score(example(reference), text).value == 1.0


@pytest.mark.parametrize(
    ("text", "number"),
    pairs("""
        7 + 5 = 12. => 12  **12** => 12  x12y => 12  12.50 dollars => 12.50  1,234,567 => 1234567  1,2,3 => 3
        3,4567 => 4567  12, => 12  8 - 20 = -12 => -12  8-20 => 20  (8)-20 => 20  - 12 => 12  12\u0664 => 12
        v1.2.3 => 3  twelve =>   =>
    """),
)
def test_the_last_number(text: str, number: str) -> None:
    assert (last_number(text) or "") == number


SAID = pairs("12 => 7 + 5 is 12  1,200 => That makes 1,200.  -3 => 9 - 12 = -3")
NOT_SAID = pairs("12 => 12, or 13  12 => 112  12 => -12  12 => 12.0  12 =>")


@pytest.mark.parametrize(("reference", "text"), [*SAID, *NOT_SAID])
def test_the_last_number_counts_where_the_configuration_says_so(
    reads_numbers: Reward, reference: str, text: str
) -> None:
    assert reads_numbers.score(example(reference), text).value == float((reference, text) in SAID)
    gold = reads_numbers.gold(example(reference))  # type: ignore[attr-defined]
    assert reads_numbers.score(example(reference), gold).value == 1.0


def test_a_flood_of_digits_and_commas_is_read_in_linear_time() -> None:
    for text in ("1" * 200_000, "1,111" * 40_000, "1," * 100_000, "-" * 200_000):
        last_number(text)  # a quadratic search would take minutes
