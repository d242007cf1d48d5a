"""Which rewards a configuration means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import PluginError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.tasks.scoring.build import build_rewards, comparing_rewards, has_verifier, judges
from retrain.tasks.scoring.pool import NamedReward


class Verifier:
    """The data source's own."""

    def score(self, example: Any, text: str) -> float:
        return 1.0


@pytest.fixture
def built(load: Callable[..., Any], toys: Path) -> Callable[..., dict[str, tuple[str, float]]]:
    """`built(text, own)`: class and weight of every reward by name."""

    def build(text: str, own: Any = None) -> dict[str, tuple[str, float]]:
        config, problems = load(f'[data]\nsource = "toy"\n{text}')
        assert not problems
        context = PluginContext(config=config, seeds=Seeds(0), plugins=load_plugins({}))
        rewards = build_rewards(config, context, own)
        return {each.name: (type(each.reward).__name__, each.weight) for each in rewards}

    return build


def test_the_type_or_the_verifier_of_the_source_and_weights_in_place_of_both(built: Callable[..., Any]) -> None:
    assert built("") == {"match": ("MatchReward", 1.0)}
    assert built("", Verifier()) == {"toy": ("Verifier", 1.0)}
    assert built('[reward]\ntype = "toy"', Verifier()) == {"toy": ("ToyReward", 1.0)}
    text = "[reward.weights]\nmatch = 1.0\ntoy = -0.5"
    wanted = {"match": ("MatchReward", 1.0), "toy": ("ToyReward", -0.5)}
    assert built(text) == built(text, Verifier()) == wanted
    assert list(built(text)) == ["match", "toy"]
    with pytest.raises(PluginError, match=r"\[reward\] weights(.|\n)*no reward named 'mtach'"):
        built("[reward.weights]\nmtach = 1.0")


def test_rewards_that_compare_say_so_themselves() -> None:
    class Comparing(Verifier):
        needs_reference = True

    named = [NamedReward(name="mine", reward=Comparing()), NamedReward(name="other", reward=Verifier())]
    assert comparing_rewards(named) == {"mine"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", True),
        ('[reward]\ntype = "none"', False),
        ("[reward.weights]\nmatch = 1.0\ntoy = 1.0", True),
        ("[reward.weights]\nmatch = 1.0\nnone = 1.0", False),  # a sum without one of its parts is no verdict
    ],
)
def test_whether_anything_is_judged_is_one_answer_by_name_and_by_object(
    text: str, expected: bool, load: Callable[..., Any], toys: Path
) -> None:
    config, problems = load(f'[data]\nsource = "toy"\n{text}')
    assert not [problem for problem in problems if "none" not in str(problem)]
    context = PluginContext(config=config, seeds=Seeds(0), plugins=load_plugins({}))
    rewards = [each.reward for each in build_rewards(config, context, None)]
    assert (has_verifier(config), judges(rewards)) == (expected, expected)
