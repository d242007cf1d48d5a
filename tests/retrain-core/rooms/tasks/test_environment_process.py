from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from retrain.kernel.contracts.tasks import LoadedData, Reply
from retrain.kernel.errors import ConfigError, Problem, RewardError
from retrain.kernel.types import Outcome, StopReason
from retrain.rooms.tasks.environment_process import HostedEnvironment
from tests.playing import Counting


class Refusing(Counting):
    def load(self) -> LoadedData:
        raise ConfigError(Problem(where="[environment] id", what="is for evaluation only", fix="take another"))


class Dying(Counting):
    def load(self) -> LoadedData:
        self.fault = "dies"
        self.said = {0: []}
        self.stops = {0: []}
        self.advance({0: said("1")})
        raise AssertionError


def said(text: str) -> Reply:
    return Reply(text=text, stop_reason=StopReason.EOS)


@pytest.fixture
def host() -> Iterator[Any]:
    hosted: list[HostedEnvironment] = []

    def make(environment: Counting, timeout_s: float = 20.0) -> HostedEnvironment:
        made = HostedEnvironment(environment, name="counting", timeout_s=timeout_s, memory_gb=4.0)
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
    hosted.begin([data.examples[1], data.examples[1]])
    asks = hosted.advance({})
    assert sorted(asks) == [0, 1]
    assert asks[0].prompt[-1]["content"] == "Count from 1."
    asks = hosted.advance({0: said("1"), 1: said("no")})
    asks = hosted.advance({0: said("2"), 1: said("2")})
    assert sorted(asks) == [1]
    assert hosted.advance({1: said("3")}) == {}
    endings = hosted.finish()
    assert [ending.score.value for ending in endings] == [1.0, 2 / 3]
    assert environment.said == {}, "nothing happened here"


def test_what_load_refuses_arrives_as_it_was_told(host: Any) -> None:
    with pytest.raises(ConfigError, match="for evaluation only") as caught:
        host(Refusing()).load()
    assert caught.value.problems[0].fix == "take another"


def test_a_process_that_dies_while_loading_is_an_error(host: Any) -> None:
    with pytest.raises(RewardError, match="could not be loaded"):
        host(Dying()).load()


@pytest.mark.parametrize("fault", ["dies", "hangs", "raises"])
def test_lost_episodes_end_as_failed_and_the_next_ones_are_played(
    host: Any, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.rooms.tasks.environment_process.GRACE_S", 0.2)
    hosted = host(Counting(fault=fault), timeout_s=0.5)
    data = hosted.load()
    hosted.begin(list(data.examples))
    asks = hosted.advance({})
    assert hosted.advance({number: said("0") for number in asks}) == {}
    endings = hosted.finish()
    assert [ending.score.outcome for ending in endings] == [Outcome.FAILED] * 3
    assert "'counting' failed in advance" in endings[0].score.detail
    hosted.begin(list(data.examples[:2]))
    assert sorted(hosted.advance({})) == [0, 1]
