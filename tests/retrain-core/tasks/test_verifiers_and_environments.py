"""Rewards and environments are one thing to whoever uses a verifier; an environment lives in its own process."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from retrain.api import Observation
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.contracts.tasks import Action, LoadedData, TimedScore, Verifier
from retrain.kernel.errors import ConfigError, Problem, RewardError
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Outcome, SamplingParams, StopReason
from retrain.tasks.environment import EnvironmentProcess, EnvironmentVerifier
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService
from retrain.tasks.tasks import RewardVerifier
from tests.kit.playing import Counting
from tests.kit.problems import codes_in

REFUSED = ConfigError(Problem(code="a.b", where="[environment] id", what="is for evaluation", fix="take another"))


class Refusing(Counting):
    def load(self) -> LoadedData:
        raise REFUSED


class Dying(Counting):
    def load(self) -> LoadedData:
        os._exit(3)


class Serving(Counting):
    """Starts a process in `load` and in each `reset`; an observation tells which of them are alive."""

    def load(self) -> LoadedData:
        self.servers = [subprocess.Popen(["sleep", "60"])]
        return super().load()

    def reset(self, examples: list[Example]) -> dict[int, Observation]:
        self.servers.append(subprocess.Popen(["sleep", "60"]))
        return super().reset(examples)

    def _messages(self, number: int) -> list[dict[str, str]]:
        alive = [server.poll() is None for server in self.servers]
        return [{"role": "user", "content": str(alive)}]


def said(text: str) -> Action:
    return Action(text=text, stop_reason=StopReason.EOS)


@pytest.fixture
def host() -> Iterator[Any]:
    hosted: list[EnvironmentProcess] = []

    def make(environment: Any, timeout_s: float = 20.0) -> EnvironmentProcess:
        made = EnvironmentProcess(environment, name="counting", timeout_s=timeout_s, memory_gb=4.0)
        hosted.append(made)
        return made

    yield make
    for each in hosted:
        each.close()
        each.close()


def test_episodes_are_played_in_another_process(host: Any) -> None:
    environment = Counting()
    hosted = host(environment)
    data = hosted.load()
    assert [example.id for example in data.examples] == ["count-0", "count-1", "count-2"]
    assert data.notes == ("counting: 3 tasks",)
    observations = hosted.reset([data.examples[1], data.examples[1]])
    assert sorted(observations) == [0, 1]
    assert observations[0].prompt[-1]["content"] == "Count from 1."
    assert sorted(hosted.step({0: said("1"), 1: said("no")})) == [0, 1]
    assert sorted(hosted.step({0: said("2"), 1: said("2")})) == [1]
    assert hosted.step({1: said("3")}) == {}
    assert [result.score.value for result in hosted.results()] == [1.0, 2 / 3]
    assert environment.said == {}, "nothing happened here"


def test_what_load_refuses_arrives_whole_and_a_process_that_dies_while_loading_is_an_error(host: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        host(Refusing()).load()
    assert refused.value.problems == REFUSED.problems
    with pytest.raises(RewardError) as caught:
        host(Dying()).load()
    assert codes_in(caught) == ["environment.cannot-load"]


def test_what_load_has_started_serves_later_calls_and_what_they_start_ends_with_them(host: Any) -> None:
    hosted = host(Serving())
    example = hosted.load().examples[0]
    assert hosted.reset([example])[0].prompt[0]["content"] == "[True, True]"
    assert hosted.reset([example])[0].prompt[0]["content"] == "[True, False, True]"


@pytest.mark.parametrize("fault", ["dies", "hangs", "raises"])
def test_lost_episodes_end_as_failed_and_the_next_ones_are_played(
    host: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.tasks.environment.GRACE_S", 0.5 if fault == "hangs" else 20.0)
    hosted = host(Counting(fault=fault), timeout_s=0.0)
    data = hosted.load()
    observations = hosted.reset(list(data.examples))
    assert hosted.step({number: said("0") for number in observations}) == {}
    results = hosted.results()
    assert [result.score.outcome for result in results] == [Outcome.FAILED] * 3
    assert "'counting' failed in step" in results[0].score.detail
    assert sorted(hosted.reset(list(data.examples[:2]))) == [0, 1]


class Length:
    """A text's length; it cannot score "boom"."""

    def score(self, example: Example, text: str) -> float:
        if text == "boom":
            raise ValueError(text)
        return float(len(text))


def check(verifier: Verifier, pairs: list[tuple[Example, str]]) -> list[TimedScore]:
    """Start, make rollouts and score; everything may be called twice."""
    context = PluginContext(config=Config(tables={}), seeds=Seeds(0), plugins=load_plugins({}))
    backend: Any = object()  # nothing is sampled here
    with closing(verifier):
        verifier.start()
        verifier.start()
        rollouts = verifier.rollouts(backend, context, SamplingParams(max_tokens=8, temperature=1.0), 100)
        with rollouts.batch("step_0") as batch:
            assert batch.metrics() is not None
        rollouts.close()
        rollouts.close()
        found = list(verifier.score_texts(pairs))
        verifier.close()
    return found


def test_rewards_score_each_text_as_a_completion_and_an_environment_plays_an_episode_of_each() -> None:
    settings = ScoringTable(workers=1, memory_gb=4.0, retries=0, timeout_s=7.0)
    rewards = RewardVerifier(ScoringService([NamedReward(name="length", reward=Length())], settings))
    assert (rewards.names, rewards.timeout_s) == (("length",), 7.0)
    assert isinstance(rewards.rewards[0], Length)
    example = Example(id="e", prompt="p", reference="1")
    found = check(rewards, [(example, "four"), (example, "four"), (example, "boom")])
    assert [each.score.value for each in found] == [4.0, 4.0, None]
    assert found[2].score.outcome is Outcome.FAILED, "a failed score is returned, however many there are"
    assert all(each.seconds > 0.0 for each in found), "equal texts are scored again, not looked up"

    environment = EnvironmentProcess(Counting(), name="counting", timeout_s=20.0, memory_gb=4.0)
    environment.load()
    plays = EnvironmentVerifier(environment)
    assert (plays.names, plays.rewards, plays.timeout_s) == (("counting",), (), None)
    zero, one, _ = Counting().load().examples
    found = check(plays, [(zero, "0"), (one, "2")])
    assert [each.score.value for each in found] == [0.5, 1 / 3]  # of two turns, and of three
