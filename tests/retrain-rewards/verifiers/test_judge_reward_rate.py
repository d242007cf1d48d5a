from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from retrain.api import Score
from retrain_rewards.verifiers.judge_client import Limiter
from retrain_rewards.verifiers.judge_reward import JudgeReward
from tests.kit.judge_server import YES, fails, run, serving, takes

Build = Callable[..., JudgeReward]


def test_no_more_calls_at_once_than_allowed(build_judge: Build) -> None:
    with serving(takes(0.05, YES)) as server:
        assert len(run(build_judge(server, judge_concurrency=2), *"abcdefgh")) == 8
        assert server.most_busy <= 2


@pytest.mark.parametrize(
    ("rate", "timeout_s", "concurrency"), [(0, 60, 8), (60, 60, 8), (10, 60, 5), (60, 10, 5), (1, 10, 1)]
)
def test_waiting_for_the_rate_leaves_half_of_the_time_limit(
    build_judge: Build, rate: int, timeout_s: float, concurrency: int
) -> None:
    assert build_judge(judge_requests_per_minute=rate, timeout_s=timeout_s).concurrency == concurrency


class Clock:
    """Time that passes only while somebody sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    async def sleep(self, seconds: float) -> None:
        until = self.now + seconds
        await asyncio.sleep(0)
        self.now = max(self.now, until)

    def limiter(self, requests: int, tokens: int) -> Limiter:
        return Limiter(requests, tokens, clock=lambda: self.now, sleep=self.sleep)


def test_requests_are_spaced_and_served_in_order() -> None:
    clock, served = Clock(), list[tuple[int, float]]()

    async def call(limiter: Limiter, number: int) -> None:
        await limiter.wait(10)
        served.append((number, clock.now - 100.0))

    async def all_calls() -> None:
        limiter = clock.limiter(30, 0)
        await asyncio.gather(*(call(limiter, number) for number in range(5)))

    asyncio.run(all_calls())
    assert served == [(0, 0.0), (1, 2.0), (2, 4.0), (3, 6.0), (4, 8.0)]


def test_tokens_are_paid_off_before_the_next_call_and_estimates_corrected() -> None:
    clock = Clock()

    async def calls() -> list[float]:
        limiter, times = clock.limiter(0, 600), []
        for tokens, settled in ((50, 0), (10, 30), (0, 0), (100, -60), (0, 0)):
            await limiter.wait(tokens)
            times.append(clock.now - 100.0)
            limiter.settle(settled)
        return times

    assert asyncio.run(calls()) == pytest.approx([0.0, 5.0, 9.0, 9.0, 13.0])


def test_who_is_cancelled_while_waiting_takes_no_place() -> None:
    clock = Clock()

    async def calls() -> float:
        limiter = clock.limiter(60, 0)
        await limiter.wait(1)
        given_up = [asyncio.create_task(limiter.wait(1)) for _ in range(10)]
        for task in given_up:
            task.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)
        await limiter.wait(1)
        return clock.now - 100.0

    assert asyncio.run(calls()) == 1.0


def test_every_further_try_waits_its_turn_too(build_judge: Build) -> None:
    waited: list[int] = []

    class Counting(Limiter):
        async def wait(self, tokens: int) -> None:
            waited.append(tokens)

    with serving(fails(500, Retry_After="0.01"), YES) as server, pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrain_rewards.verifiers.judge_client.Limiter", Counting)
        assert run(build_judge(server, judge_max_tokens=100), "a") == [Score.of(1.0)]
    assert len(waited) == 2
    assert min(waited) > 100
