"""Which rewards a configuration means; one that fails on every text ends the run before anything heavy loads."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable, ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.errors import PluginError, RewardError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example
from retrain.tasks.child.system import descendants
from retrain.tasks.scoring import trial
from retrain.tasks.scoring.build import build_rewards, comparing_rewards, has_verifier, judges
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService
from retrain.tasks.tasks import RewardVerifier
from tests.kit import user_rewards


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


@pytest.fixture
def try_out(service: Callable[..., ScoringService]) -> Any:
    """`try_out("Sound", audit="warn")`: the trial of one of `user_rewards`; returns reward and service."""

    def run(kind: str, **settings: Any) -> tuple[Any, ScoringService]:
        reward = getattr(user_rewards, kind)()
        at_work = service(reward, timeout_s=3.0, **settings)
        config = Config(tables={"scoring": ScoringTable(**settings), "data": DataTable(source="some")})
        examples = [Example(id=str(n), prompt="p", reference=str(n)) for n in range(5)]
        prompts = [Prompt(example=example, tokens_T=np.array([1])) for example in examples]
        trial.refuse_broken_rewards(RewardVerifier(at_work), prompts, config)
        return reward, at_work

    return run


@pytest.mark.parametrize(("kind", "fault"), [("Raising", "first: KeyError: 'no such key'"), ("NotANumber", "nan")])
def test_a_reward_that_fails_on_every_text_is_refused(try_out: Any, kind: str, fault: str) -> None:
    with pytest.raises(RewardError) as refused:
        try_out(kind, audit="warn")
    (problem,) = refused.value.problems
    assert (problem.code, problem.where.startswith("[reward] type")) == ("reward.always-fails", True)
    assert "all 9 texts" in problem.what
    assert fault in problem.what


KINDS = ("Sound", "OnlyEmpty", "ReadsOneFormat", "Slow", "Heavy", "Remote")


@pytest.mark.parametrize(
    ("kind", "settings"),
    [*((kind, {}) for kind in KINDS), ("Raising", {"audit": "off"}), ("Raising", {"max_failed_frac": 1.0})],
)
def test_any_other_reward_is_left_to_the_run_as_it_was(
    try_out: Any, kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "TRIAL_S", 0.3)
    before = descendants(os.getpid())
    reward, _ = try_out(kind, **settings)
    assert reward.calls == 0
    assert descendants(os.getpid()) <= before, "no scoring process was started"


def test_a_reward_that_works_in_its_scoring_process_is_not_refused(try_out: Any) -> None:
    before = descendants(os.getpid())
    try_out("OnlyInItsProcess")
    assert descendants(os.getpid()) - before
