from __future__ import annotations

import pytest

from retrain.api import Config, Example, Kind, Outcome, PluginContext, Plugins, Reward, RewardError, Seeds, resolve


@pytest.fixture
def reward(plugins: Plugins) -> Reward:
    context = PluginContext(config=Config(tables={}), seeds=Seeds(0), plugins=plugins)
    made: Reward = resolve(plugins, Kind.REWARD, "match", where="test").target(context)
    return made


def example(reference: str) -> Example:
    return Example(id="e", prompt="p", reference=reference)


@pytest.mark.parametrize(
    ("reference", "text", "value"),
    [
        ("5", r"\boxed{5}", 1.0),
        (" 5 ", r"\boxed{ 5}", 1.0),
        ("a  b", "\\boxed{a\n b}", 1.0),
        ("5", r"\boxed{6}", 0.0),
        ("5", r"\boxed{5} no, \boxed{6}", 0.0),
        ("5", r"\boxed{5", 0.0),
        ("5", "5", 0.0),
        ("5", "", 0.0),
        ("5", r"\boxed{}", 0.0),
        ("0.5", r"\boxed{1/2}", 0.0),
        ("nan", r"\boxed{nan}", 1.0),
    ],
)
def test_equal_as_text(reward: Reward, reference: str, text: str, value: float) -> None:
    score = reward.score(example(reference), text)
    assert score.outcome is Outcome.SCORED
    assert score.value == value


@pytest.mark.parametrize("reference", ["", " \n"])
@pytest.mark.parametrize("text", ["", r"\boxed{}", "silence"])
def test_an_empty_reference_is_never_a_free_point(reward: Reward, reference: str, text: str) -> None:
    with pytest.raises(RewardError, match="empty reference"):
        reward.score(example(reference), text)


@pytest.mark.parametrize("reference", ["5", " 5 ", "a  b", r"\{1\}", r"\frac{1}{2}", "nan"])
def test_gold_scores_one(reward: Reward, reference: str) -> None:
    text = reward.gold(example(reference))  # type: ignore[attr-defined]
    assert reward.score(example(reference), text).value == 1.0
