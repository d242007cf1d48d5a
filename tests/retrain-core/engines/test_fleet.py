"""Several servers behind one engine: what befalls one of them costs no completion, no truth and little time."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import ThreadingHTTPServer
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from retrain.api import BackendError, ConfigError, SampleRequest, SamplingParams
from retrain.engines import client, keeper, pool
from retrain.kernel.types import Sample
from tests.kit import http_handler
from tests.kit import inference_server as faulty
from tests.kit.http_handler import in_a_thread
from tests.kit.inference_server import InferenceServer, serving
from tests.kit.toy_policy import ToyModel, ToyPolicy
from tests.kit.waiting import wait_until

LOAD = "/v1/load_lora_adapter"
PARAMS = SamplingParams(max_tokens=8, temperature=0.7)
MANY = [SampleRequest(prompt_T=np.arange(3, 20), seeds_G=tuple(range(40)))]


@pytest.fixture
def fleet() -> Iterator[list[InferenceServer]]:
    """Three servers that have the same model."""
    with ExitStack() as stack:
        yield [stack.enter_context(serving(ToyModel())) for _ in range(3)]


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers are found dead, and back, within a fraction of a second."""
    monkeypatch.setattr(pool, "DEAD_AFTER_S", 0.3)
    monkeypatch.setattr(pool, "LONGEST_PAUSE_S", 0.3)
    monkeypatch.setattr(keeper, "LONGEST_PAUSE_S", 0.3)
    monkeypatch.setattr(keeper, "LOOK_EVERY_S", 0.1)
    made = client.Call.__init__
    monkeypatch.setattr(made, "__kwdefaults__", {**made.__kwdefaults__, "timeout_s": 0.3})


def gap(policy: ToyPolicy, groups: list[list[Sample]]) -> float:
    return policy.gap(MANY, groups)


@contextmanager
def restarted(server: InferenceServer, model: ToyModel) -> Iterator[InferenceServer]:
    """Another server at the address of one that has died."""
    with serving(model, port=server.server_address[1]) as running:
        yield running


def test_a_slow_server_delays_only_itself(make_engine, fleet, policy) -> None:
    engine, slow, free = make_engine(*fleet), fleet[2], threading.Event()
    change = slow.model.load

    def waiting(folder: Path) -> Any:
        free.wait(60)
        return change(folder)

    slow.model.load = waiting  # type: ignore[method-assign]
    policy.train()
    engine.publish()
    slow.requests.clear()
    assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
    assert not slow.completions, "it was asked for a version that it had not"
    assert engine.metrics()["inference_servers"] == 2
    free.set()
    wait_until(lambda: engine.metrics()["inference_servers"] == 3)
    assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
    assert len(slow.completions) > 4


def test_a_server_that_keeps_old_weights_gets_no_requests_until_it_has_the_new_ones(
    make_engine, fleet, policy, caplog
) -> None:
    engine, stale = make_engine(*fleet), fleet[0]
    policy.train()
    engine.publish()
    stale.is_stale = True
    policy.train()
    engine.publish()
    wait_until(lambda: "gets no requests" in caplog.text)
    assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
    stale.is_stale = False
    wait_until(lambda: engine.metrics()["inference_servers"] == 3)
    loaded = [body["lora_name"] for path, body in stale.requests if path == LOAD]
    assert len(set(loaded)) == len(loaded), "a name keeps its weights"
    assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
    told = [record.getMessage() for record in caplog.records if stale.url in record.getMessage()]
    assert len([line for line in told if "gets no requests" in line]) == 1, "one line per change"
    assert f"{stale.url} has policy version 2; before: the server does not sample from policy version 2" in told[-1]


def test_old_weights_are_found_out_though_the_policy_is_certain_of_what_it_samples(make_engine, fleet, policy) -> None:
    """Samples then have a log-probability of 0 in every version; what the policy thinks of other tokens differs."""
    for model in (policy.model, *(server.model for server in fleet)):
        model.table *= 100.0
    engine, stale = make_engine(*fleet[:2]), fleet[0]
    policy.train(0.1)
    engine.publish()
    stale.is_stale = True
    right_load = fleet[1].model.load
    fleet[1].model.load = lambda folder: (time.sleep(0.3), right_load(folder))[1]  # the stale one has it first
    policy.train(0.1)
    engine.publish()
    for _ in range(3):
        assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-6
    assert engine._caller.servers[0].is_rejected
    assert not engine._caller.servers[1].is_rejected


@pytest.mark.slow
def test_a_server_that_comes_back_with_another_model_is_not_asked(make_engine, fleet, policy, impatient) -> None:
    engine, other = make_engine(*fleet), fleet[1]
    policy.train()
    engine.publish()
    other.die()
    assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
    wait_until(lambda: engine.metrics()["inference_servers"] == 2)
    with restarted(other, ToyModel(seed=9)) as wrong:
        wait_until(lambda: len(wrong.completions) >= 2)  # it was probed, although nobody asked for a completion
        known = len(wrong.completions)
        assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
        assert all(body["max_tokens"] == 2 for body in wrong.completions[known:])
    with restarted(other, ToyModel()) as right:
        wait_until(lambda: engine.metrics()["inference_servers"] == 3)
        assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
        assert max(len(body["prompt"]) for body in right.completions) > 400


def test_an_answer_of_another_model_is_never_used_and_its_server_is_compared_again(make_engine, fleet, policy) -> None:
    engine, other = make_engine(*fleet), fleet[1]
    policy.train()
    engine.publish()
    other.faults.append(faulty.changed(model="somebody-else"))
    assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
    wait_until(lambda: engine.metrics()["inference_servers"] == 3)
    assert not other.faults
    named = [body.get("return_tokens_as_token_ids") for body in other.completions if body["logprobs"]]
    assert named
    assert all(named), "texts name no tokens"
    assert engine._adapters.num_reloads == 1


def test_a_server_that_is_away_at_the_start_is_used_once_it_answers(make_engine, policy, caplog) -> None:
    with serving(ToyModel()) as one, serving(ToyModel()) as two:
        two.die()
        engine = make_engine(one, two)
        assert f"{two.url} is used once it answers" in caplog.text
        assert len(engine.sample(MANY, PARAMS)[0]) == 40
        with restarted(two, ToyModel()) as late:
            wait_until(lambda: engine.metrics()["inference_servers"] == 2)
            assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
            assert any(body["max_tokens"] == 8 for body in late.completions)
            engine.close()


def test_a_request_may_fail_for_longer_than_retry_s_while_another_server_samples(make_engine, fleet) -> None:
    broken, busy, _ = fleet
    engine = make_engine(broken, busy, retry_s=0.4)
    broken.always, busy.limit, busy.latency_s = faulty.status(500), 1, 0.1
    few = [SampleRequest(prompt_T=np.arange(3, 20), seeds_G=tuple(range(10)))]
    assert len(engine.sample(few, PARAMS)[0]) == 10


@pytest.mark.slow
def test_requests_on_a_server_that_hangs_move_to_another_long_before_their_time_is_up(
    make_engine, fleet, policy, impatient
) -> None:
    engine = make_engine(*fleet, timeout_s=600.0)
    expected = [sample.tokens_T.tolist() for sample in engine.sample(MANY, PARAMS)[0]]
    hanging, seen = fleet[1], Counter[tuple[int, int]]()
    engine.metrics()
    hanging.hangs = True  # answers nothing at all, not even that it is there
    groups = engine.sample(MANY, PARAMS, lambda group, index, sample: seen.update([(group, index)]))
    assert [sample.tokens_T.tolist() for sample in groups[0]] == expected, "the same seeds elsewhere"
    assert set(seen.values()) == {1}
    assert len(seen) == 40
    assert engine.metrics()["inference_moved"] > 0
    wait_until(lambda: engine.metrics()["inference_servers"] == 2)  # the others too may take longer than 0.3 s
    hanging.hangs = False
    wait_until(lambda: engine.metrics()["inference_servers"] == 3)


@pytest.mark.slow
def test_a_version_is_published_while_completions_of_the_one_before_are_sampled(make_engine, fleet, policy) -> None:
    engine = make_engine(*fleet, keep_versions=1, max_concurrent=6)
    for server in fleet:
        server.latency_s = 0.2
    before = ToyPolicy(weights=policy.weights)
    found: list[list[list[Sample]]] = []
    sampling = threading.Thread(target=lambda: found.append(engine.sample(MANY, PARAMS)))
    sampling.start()
    wait_until(lambda: sum(server.busy for server in fleet) > 4)
    policy.train()
    engine.publish()
    assert sampling.is_alive()
    assert all(len(server.adapters) == 2 for server in fleet), "the older one is in use"
    sampling.join()
    (groups,) = found
    assert {sample.policy_version for sample in groups[0]} == {0}
    assert gap(before, groups) < 1e-9
    groups = engine.sample(MANY, PARAMS)
    assert {sample.policy_version for sample in groups[0]} == {1}
    assert gap(policy, groups) < 1e-9
    wait_until(lambda: all(len(server.adapters) == 1 for server in fleet))


@pytest.mark.slow
def test_a_restarted_server_gets_no_request_before_it_has_the_weights_again(
    make_engine, fleet, policy, impatient, tmp_path
) -> None:
    """It answers under the right name from the start, with the weights that it was started with."""
    engine = make_engine(*fleet)
    policy.train()
    policy.save_adapter(tmp_path)
    engine.load_weights(tmp_path, policy.version)
    lost = fleet[1]
    lost.die()
    assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
    with restarted(lost, ToyModel()) as empty:
        for _ in range(3):
            assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
        wait_until(lambda: engine.metrics()["inference_servers"] == 3)
        assert gap(policy, engine.sample(MANY, PARAMS)) < 1e-9
        paths = [path for path, _ in empty.requests]
        assert "/update_weights" in paths[: paths.index("/v1/completions")]


# ---------------------------------------------------------------- behind a router


class Router(http_handler.Handler):
    """Forwards what samples, to each server in turn; every other route is unknown."""

    servers: tuple[InferenceServer, ...]
    turns: Iterator[int]

    def do_GET(self) -> None:
        self.forward(None)

    def do_POST(self) -> None:
        self.forward(self.body())

    def forward(self, body: bytes | None) -> None:
        if self.path not in ("/v1/models", "/v1/completions"):
            self.send_error(404)
            return
        url = self.servers[next(self.turns) % len(self.servers)].url + self.path
        answer = httpx.request("GET" if body is None else "POST", url, content=body)
        self.send(answer.status_code, answer.content)


@pytest.fixture
def servers() -> Iterator[tuple[InferenceServer, ...]]:
    with serving(ToyModel()) as one, serving(ToyModel()) as other:
        yield one, other


@pytest.fixture
def router(servers: tuple[InferenceServer, ...]) -> Iterator[SimpleNamespace]:
    handler = type("RouterOfTwo", (Router,), {"servers": servers, "turns": count()})
    with in_a_thread(ThreadingHTTPServer(("127.0.0.1", 0), handler)) as port:
        yield SimpleNamespace(url=f"http://127.0.0.1:{port}")


def loads(server: InferenceServer) -> list[str]:
    return [body["lora_name"] for path, body in server.requests if path.endswith("/load_lora_adapter")]


@pytest.mark.slow
def test_adapters_go_to_each_server_behind_the_router_and_completions_to_the_router(
    make_engine, policy, router, servers, requests, params
):
    engine = make_engine(router, admin_url=",".join(server.url for server in servers))
    policy.train()
    engine.publish()
    samples = engine.sample(requests, params)
    assert {sample.policy_version for group in samples for sample in group} == {1}
    assert loads(servers[0]) == loads(servers[1])
    assert all(server.completions for server in servers)
    servers[1].adapters.clear()  # restarted: nobody can tell which of them answered that the adapter is unknown
    engine.sample(requests, params)
    assert loads(servers[1])[-1] in loads(servers[1])[:-1]


def test_a_router_is_one_server_that_needs_the_addresses_behind_it(make_engine, router, servers):
    with pytest.raises(ConfigError, match="names 2 servers"):
        make_engine(*servers, admin_url=router.url)
    with pytest.raises(BackendError, match="404"):
        make_engine(router, retry_s=0.2)
