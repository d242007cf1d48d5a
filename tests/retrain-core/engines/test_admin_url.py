"""A router in front of servers takes completions only; adapters go to each server behind it, by `admin_url`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from types import SimpleNamespace

import httpx
import pytest

from retrain.api import BackendError, ConfigError
from tests.kit.inference_server import InferenceServer, serving
from tests.kit.toy_policy import ToyModel


class Router(BaseHTTPRequestHandler):
    """Forwards what samples, to each server in turn; every other route is unknown."""

    servers: tuple[InferenceServer, ...]
    turns: Iterator[int]

    def do_GET(self) -> None:
        self.forward(None)

    def do_POST(self) -> None:
        self.forward(self.rfile.read(int(self.headers["Content-Length"])))

    def forward(self, body: bytes | None) -> None:
        if self.path not in ("/v1/models", "/v1/completions"):
            self.send_error(404)
            return
        url = self.servers[next(self.turns) % len(self.servers)].url + self.path
        answer = httpx.request("GET" if body is None else "POST", url, content=body)
        self.send_response(answer.status_code)
        self.send_header("Content-Length", str(len(answer.content)))
        self.end_headers()
        self.wfile.write(answer.content)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


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


@pytest.mark.slow
def test_a_server_behind_the_router_that_was_restarted_gets_its_adapter_again(
    make_engine, router, servers, requests, params
):
    engine = make_engine(router, admin_url=",".join(server.url for server in servers))
    servers[1].adapters.clear()  # restarted: nobody can tell which of them answered that the adapter is unknown
    engine.sample(requests, params)
    assert loads(servers[1])[-1] == loads(servers[1])[0]


def test_a_router_is_one_server(make_engine, router, servers):
    with pytest.raises(ConfigError, match="names 2 servers"):
        make_engine(*servers, admin_url=router.url)


def test_without_admin_url_the_router_refuses_the_adapter(make_engine, router):
    with pytest.raises(BackendError, match="404"):
        make_engine(router, retry_s=0.5)
