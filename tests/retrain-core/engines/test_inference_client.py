"""Failing requests: retried when that helps, reported once when it does not, and never trained on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from retrain.api import BackendError, SampleRequest, SamplingParams
from retrain.engines.client import Call, Client, RefusedError
from retrain.engines.pool import FIRST_PAUSE_S, LONGEST_PAUSE_S, Pool, Server, jittered
from retrain.engines.table import Settings
from tests.kit import inference_server as faulty

PARAMS = SamplingParams(max_tokens=8, temperature=0.7)
EIGHT = [SampleRequest(prompt_T=np.arange(3, 20), seeds_G=tuple(range(8)))]


class StopError(BaseException):
    """The exception that stops a run."""


def tokens(groups: Any) -> list[list[int]]:
    return [sample.tokens_T.tolist() for group in groups for sample in group]


PASSING = {
    "429": faulty.status(429),
    "429 with Retry-After": faulty.status(429, Retry_After="0.2"),
    "500": faulty.status(500),
    "503 with a date": faulty.status(503, Retry_After="Fri, 20 Nov 2026 22:00:00 GMT"),
    "408": faulty.status(408),
    "hangs up": faulty.hangs_up,
    "truncated JSON": faulty.truncated,
    "a gateway's page": faulty.not_json,
    "NaN": faulty.changed(token_logprobs=lambda values: [float("nan"), *values[1:]]),
    "another prompt": faulty.changed(prompt_token_ids=[1, 2, 3]),
    "no choice": faulty.changed(choices=[]),
}


@pytest.mark.parametrize("fault", PASSING.values(), ids=PASSING.keys())
def test_a_passing_fault_changes_nothing_but_the_count_of_retries(make_engine, server, fault) -> None:
    engine = make_engine(server)
    expected = tokens(engine.sample(EIGHT, PARAMS))
    engine.metrics()
    server.faults.extend([None, fault, None, fault])
    assert tokens(engine.sample(EIGHT, PARAMS)) == expected
    assert engine.metrics()["inference_retries"] == 2


@pytest.mark.parametrize("fault", ["truncated JSON", "NaN"])
def test_a_server_that_always_answers_wrongly_is_one_clear_error(make_engine, server, fault) -> None:
    engine = make_engine(server, retry_s=600.0)
    server.always = PASSING[fault]
    with pytest.raises(BackendError, match=r"of prompt 0 returned unusable answers.*\n.*tried 3 times; none") as caught:
        engine.sample(EIGHT, PARAMS)
    assert str(caught.value).startswith(server.url)


def test_a_refused_request_is_not_sent_again_and_its_reason_shown_without_control_characters(
    make_engine, server
) -> None:
    engine = make_engine(server)
    server.requests.clear()
    server.always = lambda handler, answer: handler.error(400, "\x1b[31mred\n\n alert" + "x" * 5000)
    with pytest.raises(RefusedError, match=r"HTTP 400: .*red alert") as caught:
        engine.sample([SampleRequest(prompt_T=np.arange(3, 9), seeds_G=(1,))], PARAMS)
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 600
    assert len(server.completions) == 1


def test_a_request_that_hangs_is_sent_again_until_retry_s_is_over(make_engine, server) -> None:
    engine = make_engine(server, timeout_s=1.0)
    expected = tokens(engine.sample(EIGHT, PARAMS))
    server.faults.extend([faulty.hangs] * 2)
    assert tokens(engine.sample(EIGHT, PARAMS)) == expected
    engine = make_engine(server, timeout_s=1.0, retry_s=1.5)
    server.always = faulty.hangs
    with pytest.raises(BackendError, match=r"no answer within.*\n?.*\[inference\] retry_s = 1\.5 ended it"):
        engine.sample(EIGHT, PARAMS)


def test_a_storm_of_429_ends_in_all_samples(make_engine, server) -> None:
    engine = make_engine(server, retry_s=60.0)
    server.limit, server.latency_s = 2, 0.01
    many = [SampleRequest(prompt_T=np.arange(3, 20), seeds_G=tuple(range(64)))]
    assert len(tokens(engine.sample(many, PARAMS))) == 64
    assert engine.metrics()["inference_retries"] > 0
    (known,) = engine._caller.servers
    assert known.room < 32  # it has learnt that the server does not take all at once
    assert engine.sample([], PARAMS) == []


def test_a_stop_or_a_signal_ends_sampling_at_once_and_gives_up_what_is_in_flight(make_engine, server) -> None:
    stops = threading.Event()

    def stop(*_: object) -> None:
        if stops.is_set():
            raise StopError

    engine = make_engine(server, check_stop=stop)
    server.always = faulty.hangs
    before = signal.signal(signal.SIGUSR1, lambda *_: (stops.set(), stop()))
    try:
        for request, *given in ((stops.set,), (os.kill, os.getpid(), signal.SIGUSR1)):
            stops.clear()
            threading.Timer(0.3, request, given).start()
            with pytest.raises(StopError):
                engine.sample(EIGHT, PARAMS)
    finally:
        signal.signal(signal.SIGUSR1, before)
    server.always = None
    stops.clear()
    assert len(tokens(engine.sample(EIGHT, PARAMS))) == 8


def test_an_error_of_whoever_takes_the_samples_ends_the_rest(make_engine, server) -> None:
    engine = make_engine(server, max_concurrent=2)
    server.requests.clear()

    def deliver(group: int, index: int, sample: object) -> None:
        raise ValueError("no room")

    many = [SampleRequest(prompt_T=np.arange(3, 20), seeds_G=tuple(range(200)))]
    with pytest.raises(ValueError, match="no room"):
        engine.sample(many, PARAMS, deliver)
    assert len(server.completions) < 200


def test_a_fault_of_ours_in_reading_is_not_swallowed(server) -> None:
    client = Client(Settings(urls=(server.url,)))

    def read(answer: Any) -> None:
        raise ZeroDivisionError("ours")

    try:
        with pytest.raises(ZeroDivisionError, match="ours"):
            client.results([Call(path="/v1/models", read=read)])
        assert client.results([Call(path="/v1/models", read=lambda answer: answer["data"][0]["id"])]) == ["toy"]
    finally:
        client.close()
        client.close()


# ---------------------------------------------------------------- which server gets the next request


def in_a_loop(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    return lambda: asyncio.run(test())


@in_a_loop
async def test_the_least_loaded_server_is_next() -> None:
    pool = Pool(["http://a", "http://b", "http://c"], max_concurrent=10)
    async with pool.slot() as one, pool.slot() as two, pool.slot() as three:
        assert {one, two, three} == set(pool.servers)
        async with pool.slot() as four:
            assert four.load == 2
    async with pool.slot(pool.servers[2]) as pinned:
        assert pinned is pool.servers[2]
        async with pool.slot() as other:
            assert other is not pinned
    assert all(server.load == 0 for server in pool.servers)
    pool.servers[0].answer_s, pool.servers[1].answer_s, pool.servers[2].answer_s = 0.3, 0.1, 0.1
    async with pool.slot() as one, pool.slot() as two, pool.slot() as three, pool.slot() as four:
        assert pool.servers[0] not in (one, two, three, four), "the share of a slow server shrinks"


@in_a_loop
async def test_a_server_put_aside_is_left_alone_and_comes_back() -> None:
    pool = Pool(["http://a", "http://b"], max_concurrent=10)
    first, second = pool.servers
    pool.back_off(first)
    for _ in range(5):
        async with pool.slot() as server:
            assert server is second
    pool.answered(first)
    for _ in range(4):
        async with pool.slot() as one, pool.slot() as two:
            assert {one, two} == {first, second}


@in_a_loop
async def test_when_all_are_aside_the_first_that_is_back_is_waited_for() -> None:
    pool = Pool(["http://a", "http://b"], max_concurrent=10)
    pool.back_off(pool.servers[0], at_least_s=0.2)
    pool.back_off(pool.servers[1], at_least_s=30.0)
    started = asyncio.get_running_loop().time()
    async with pool.slot() as server:
        assert server is pool.servers[0]
    assert asyncio.get_running_loop().time() - started >= 0.2


@in_a_loop
async def test_pauses_double_up_to_a_limit_and_many_failures_at_once_are_one() -> None:
    pool = Pool(["http://a"], max_concurrent=10)
    (server,) = pool.servers
    pauses = []
    for _ in range(10):
        started = asyncio.get_running_loop().time()
        for _ in range(50):
            pool.back_off(server)
        pauses.append(server.backoff_until - started)
        server.backoff_until = 0.0
    pool.answered(server)
    assert server.failures == 0
    assert pauses[:2] == pytest.approx([FIRST_PAUSE_S, 2 * FIRST_PAUSE_S], abs=0.1)
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S, abs=0.1)


@in_a_loop
async def test_a_server_that_says_too_many_gets_fewer_and_then_more_again() -> None:
    pool = Pool(["http://a"], max_concurrent=100)
    (server,) = pool.servers
    server.load = 40
    for _ in range(20):
        pool.reduce_room(server)
        pool.back_off(server)
    assert server.room == 20
    server.backoff_until = 0.0
    pool.reduce_room(server)
    assert server.room == 10
    for _ in range(10):
        pool.answered(server)
    assert 10.9 < server.room < 11.1


def test_a_login_is_not_part_of_a_name_and_jitter_only_adds() -> None:
    assert Server.at("http://user:pass@host:8000/base").name == "http://host:8000/base"
    values = [jittered(1.0) for _ in range(200)]
    assert 1.0 <= min(values) < max(values) <= 1.25
