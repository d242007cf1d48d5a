"""Failing requests: retried when that helps, reported once when it does not, and never trained on."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import numpy as np
import pytest

from retrain.api import BackendError, SampleRequest, SamplingParams
from retrain.engines.client import Call, Client, RefusedError
from retrain.engines.table import Settings
from tests.kit import inference_server as faulty
from tests.kit.inference_server import InferenceServer, serving
from tests.kit.toy_policy import ToyModel

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
    with pytest.raises(
        BackendError, match=r"of prompt 0 failed.*\n.*3 answers were unusable; none was trained"
    ) as caught:
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
    engine = make_engine(server, timeout_s=0.2, retry_s=0.3)
    server.always = faulty.hangs
    with pytest.raises(BackendError, match=r"no answer within.*\n?.*\[inference\] retry_s = 0\.3 ended it"):
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


@pytest.mark.slow
def test_a_server_killed_and_started_again_in_the_middle_of_a_step(make_engine, policy) -> None:
    with serving(ToyModel()) as server:
        server.latency_s = 0.05
        engine = make_engine(server, max_concurrent=4, retry_s=30.0)
        policy.train()
        engine.publish()
        many = [SampleRequest(prompt_T=np.arange(3, 20), seeds_G=tuple(range(40)))]
        expected = tokens(engine.sample(many, PARAMS))
        port, again = server.server_address[1], []

        def replace() -> None:
            server.die()
            time.sleep(0.5)
            again.append(InferenceServer(ToyModel(), port=port))
            threading.Thread(target=again[0].serve_forever, args=(0.01,), daemon=True).start()

        timer = threading.Timer(0.2, replace)
        timer.start()
        assert tokens(engine.sample(many, PARAMS)) == expected
        timer.join()
        assert engine._adapters.current.key in again[0].adapters
        engine.close()
        again[0].die()


def test_a_stop_ends_sampling_and_gives_up_what_is_in_flight(make_engine, server) -> None:
    asked = threading.Event()

    def check_stop() -> None:
        if asked.is_set():
            raise StopError

    engine = make_engine(server, check_stop=check_stop)
    server.always = faulty.hangs
    timer = threading.Timer(0.5, asked.set)
    timer.start()
    with pytest.raises(StopError):
        engine.sample(EIGHT, PARAMS)
    server.always = None
    asked.clear()
    assert len(tokens(engine.sample(EIGHT, PARAMS))) == 8


def test_a_signal_ends_sampling_at_once(make_engine, server) -> None:
    engine = make_engine(server)
    server.always = faulty.hangs

    def stop(*_: object) -> None:
        raise StopError

    before = signal.signal(signal.SIGUSR1, stop)
    timer = threading.Timer(0.3, os.kill, args=(os.getpid(), signal.SIGUSR1))
    timer.start()
    try:
        with pytest.raises(StopError):
            engine.sample(EIGHT, PARAMS)
    finally:
        signal.signal(signal.SIGUSR1, before)


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
