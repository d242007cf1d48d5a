"""Rewards in the event loop: limits of number and time, failures, and one that does not await."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from retrain.kernel.errors import RewardError
from retrain.kernel.types import Example, Outcome, Score
from retrain.tasks.scoring.service import ScoringService
from tests.kit import user_rewards as rewards
from tests.kit.problems import codes_in, refused

Make = Callable[..., ScoringService]


def test_whatever_goes_wrong_is_a_failed_score(
    service: Make, example: Example, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain.tasks.scoring.event_loop.JOIN_S", 0.2)  # one call ignores its cancellation
    wanted = {
        "busy": "RuntimeError: 429: too many requests",
        "hang": "timed out after 0.2 s",
        "ignore": "timed out after 0.2 s",
        "exit": "SystemExit: 1",
        "nan": "the reward returned nan, not a finite number",
    }
    acts = service(rewards.AsyncActs(), timeout_s=0.2, retries=1, max_failed_frac=1.0)
    with acts.batch() as batch:
        for text in (*wanted, "fine"):
            batch.submit(example, text)
        scores = batch.collect()
        assert [score.detail.partition(" (")[0] for score in scores] == [*wanted.values(), ""]
        assert "user_rewards.py:" in scores[0].detail
        assert scores[-1] == Score.of(0.5)
        assert batch.metrics()["timed_out_score_count"] == 2
    with service(rewards.AsyncActs(), retries=0, max_failed_frac=1.0, timeout_s=1.0).batch() as batch:
        batch.submit(example, "hang")
        batch.submit(example, "cancel")  # a reward that cancels everything hangs nothing
        assert {score.outcome for score in batch.collect(within_budget=False)} == {Outcome.FAILED}


@pytest.mark.slow
def test_waiting_for_a_place_is_no_scoring(service: Make, example: Example) -> None:
    acts = service(rewards.AsyncActs(), timeout_s=1.0, retries=0, cache=False, max_failed_frac=0.5)
    with acts.batch() as batch:
        for _ in range(8):  # twice all places
            batch.submit(example, "hang")
        for _ in range(8):
            batch.submit(example, "fine")
        scores = batch.collect()
    assert [score.outcome for score in scores] == [Outcome.FAILED] * 8 + [Outcome.SCORED] * 8


@pytest.mark.slow
def test_a_reward_that_does_not_await_is_found_out(service: Make, example: Example) -> None:
    acts = service(acts=rewards.AsyncActs(), match=rewards.Match(), timeout_s=0.5, retries=0, max_failed_frac=1.0)
    with acts.batch() as batch:
        batch.submit(example, "block")
        with pytest.raises(RewardError) as caught:
            batch.collect()
    assert codes_in(caught) == ["reward.blocks-loop"]
    assert "user_rewards.py:" in str(caught.value)
    with acts.batch() as batch:
        batch.submit(example, "7")
        assert batch.collect()[0].parts == {"acts": 0.5, "match": 1.0}


def test_figures_that_are_none_are_passed_over(
    service: Make, example: Example, caplog: pytest.LogCaptureFixture
) -> None:
    acts = rewards.AsyncActs()
    acts.metrics = lambda: {"cost": float("nan")}
    with service(acts).batch() as batch:
        batch.submit(example, "fine")
        batch.collect()
        assert "cost" not in batch.metrics()
    assert "metrics() of reward 'the_reward' raised ValueError: cost = nan" in caplog.text
    acts = rewards.AsyncActs()
    with service(acts, cache=False).batch() as batch:
        for n in range(40):
            batch.submit(example, str(n))
        assert {score.value for score in batch.collect()} == {0.5}
        assert batch.metrics()["acts_calls"] == 40
    assert acts.most == 4, "no more than the concurrency at a time"


@pytest.mark.parametrize(
    ("name", "value", "code"),
    [("concurrency", 0, "reward.bad-concurrency"), ("prepare", lambda: 1 / 0, "reward.cannot-prepare")],
)
def test_what_cannot_work_is_refused_at_the_start(name: str, value: Any, code: str, service: Make) -> None:
    acts = rewards.AsyncActs()
    setattr(acts, name, value)
    assert refused(service(acts).start) == [code]
