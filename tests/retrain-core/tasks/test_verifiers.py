"""Rewards and environments are one thing to whoever uses a verifier."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Verifier
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Outcome, SamplingParams
from retrain.tasks.environment import EnvironmentProcess, EnvironmentVerifier
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService
from retrain.tasks.tasks import RewardVerifier
from tests.kit.playing import Counting


class Length:
    """A text's length; it cannot score "boom"."""

    def score(self, example: Example, text: str) -> float:
        if text == "boom":
            raise ValueError(text)
        return float(len(text))


def reward_verifier() -> RewardVerifier:
    settings = ScoringTable(workers=1, memory_gb=4.0, retries=0, timeout_s=7.0)
    return RewardVerifier(ScoringService([NamedReward(name="length", reward=Length())], settings))


def environment_verifier() -> EnvironmentVerifier:
    environment = EnvironmentProcess(Counting(), name="counting", timeout_s=20.0, memory_gb=4.0)
    environment.load()
    return EnvironmentVerifier(environment)


@pytest.fixture(params=[reward_verifier, environment_verifier], ids=["rewards", "environment"])
def verifier(request: pytest.FixtureRequest) -> Iterator[Verifier]:
    made: Verifier = request.param()
    yield made
    made.close()
    made.close()


def test_both_start_and_make_rollouts(verifier: Verifier) -> None:
    verifier.start()
    verifier.start()
    context = PluginContext(config=Config(tables={}), seeds=Seeds(0), plugins=load_plugins({}))
    backend: Any = object()  # nothing is sampled here
    rollouts = verifier.rollouts(backend, context, SamplingParams(max_tokens=8, temperature=1.0), 100)
    with rollouts.batch("step_0") as batch:
        assert batch.metrics() is not None
    rollouts.close()
    rollouts.close()


def test_rewards_score_each_text_as_a_completion() -> None:
    verifier = reward_verifier()
    assert (verifier.names, verifier.timeout_s) == (("length",), 7.0)
    assert isinstance(verifier.rewards[0], Length)
    example = Example(id="e", prompt="p", reference="1")
    try:
        found = verifier.score_texts([(example, "four"), (example, "four"), (example, "boom")])
    finally:
        verifier.close()
    assert [each.score.value for each in found] == [4.0, 4.0, None]
    assert found[2].score.outcome is Outcome.FAILED, "a failed score is returned, however many there are"
    assert all(each.seconds > 0.0 for each in found), "equal texts are scored again, not looked up"


def test_an_environment_plays_an_episode_of_each_text() -> None:
    verifier = environment_verifier()
    assert (verifier.names, verifier.rewards, verifier.timeout_s) == (("counting",), (), None)
    zero, one, _ = Counting().load().examples
    try:
        found = verifier.score_texts([(zero, "0"), (one, "2")])
    finally:
        verifier.close()
    assert [each.score.value for each in found] == [0.5, 1 / 3]  # of two turns, and of three
