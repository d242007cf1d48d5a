"""A router in front of servers takes completions only; adapters go to each server behind it, by `admin_url`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import ThreadingHTTPServer
from itertools import count
from types import SimpleNamespace

import httpx
import pytest

from retrain.api import BackendError, ConfigError
from tests.kit import http_handler
from tests.kit.inference_server import InferenceServer, serving
from tests.kit.toy_policy import ToyModel


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
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield SimpleNamespace(url=f"http://127.0.0.1:{running.server_port}")
        running.shutdown()
        thread.join()


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
