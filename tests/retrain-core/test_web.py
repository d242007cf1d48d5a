"""Clients that are slow, too many or speak no HTTP take nothing from the others, and the server stops at once."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from retrain import web
from retrain.web import Server

GET = b"GET /hello HTTP/1.1\r\nHost: x\r\n\r\n"
BEGUN = b"POST /hello HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n12345"


async def hello(request: Request) -> Response:
    await request.body()
    return Response("hello")


async def broken(request: Request) -> Response:
    raise ValueError("the reason")


async def endless(request: Request) -> Response:
    async def parts() -> AsyncIterator[bytes]:
        while True:
            yield b"x" * 2**16
            await asyncio.sleep(0)

    return StreamingResponse(parts())


APP = Starlette(
    routes=[Route("/hello", hello, methods=["GET", "POST"]), Route("/endless", endless), Route("/broken", broken)]
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(web, "IDLE_S", 1.0)
    monkeypatch.setenv("WEB_CONCURRENCY", "nonsense")
    with Server(APP, "127.0.0.1", 0) as running:
        yield running


def connected(server: Server) -> socket.socket:
    return socket.create_connection((server.host, server.port), timeout=20)


def greeted(server: Server) -> bool:
    with connected(server) as client:
        client.sendall(GET)
        return client.recv(4096).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize("sent", [b"", GET[:-2], BEGUN, GET], ids=["nothing", "half a head", "half a body", "kept"])
def test_a_client_that_sends_no_more_is_dropped(server: Server, sent: bytes) -> None:
    with connected(server) as client:
        client.sendall(sent)
        with suppress(ConnectionResetError):
            while client.recv(4096):
                pass
    assert greeted(server)


def test_a_client_that_takes_nothing_is_dropped_and_one_that_does_is_not(server: Server) -> None:
    ask = GET.replace(b"hello", b"endless")
    with connected(server) as slow, connected(server) as quick:
        slow.sendall(ask)
        quick.sendall(ask)
        while len(server._server.server_state.connections) > 1:
            assert quick.recv(2**20)
        assert quick.recv(2**20)


def test_connections_are_limited_and_a_place_comes_back(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "MOST_CONNECTIONS", 2)
    monkeypatch.setattr(web, "IDLE_S", 60.0)
    kept = [connected(server) for _ in range(2)]
    with connected(server) as refused:
        assert refused.recv(4096) == b""
    for client in kept:
        client.sendall(GET)
        assert client.recv(4096)
        client.close()
    while server._server.server_state.connections:  # the test's time limit ends a wait in vain
        time.sleep(0.01)
    assert greeted(server)


@pytest.mark.parametrize(
    ("sent", "status"), [(b"NONSENSE\r\n\r\n", 400), (b"GET / HTTP/1.1\r\n\r\n", 400), (b"X" * 70_000, 431)]
)
def test_what_is_no_http_is_refused_in_json(server: Server, sent: bytes, status: int) -> None:
    with connected(server) as client:
        client.sendall(sent)
        head, _, body = b"".join(iter(lambda: client.recv(4096), b"")).partition(b"\r\n\r\n")
    assert int(head.split()[1]) == status
    assert json.loads(body)["error"]["type"] == "invalid_request_error"


def test_uvicorn_writes_nothing_of_its_own_and_an_error_is_logged_as_ours(
    server: Server, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with connected(server) as client:
        client.sendall(GET.replace(b"Host: x", b"Host: x\r\nConnection: upgrade\r\nUpgrade: websocket"))
        assert client.recv(4096).startswith(b"HTTP/1.1 200 ")
    with connected(server) as client:
        client.sendall(GET.replace(b"hello", b"broken"))
        assert client.recv(4096).startswith(b"HTTP/1.1 500 ")
    while not caplog.records:
        time.sleep(0.01)
    assert [record.name for record in caplog.records] == ["retrain.web"]
    assert "hello" not in caplog.text
    assert capfd.readouterr() == ("", "")


def test_closing_waits_for_no_client_and_frees_the_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(web, "GRACE_S", 0.2)
    before = threading.active_count()
    server = Server(APP, "127.0.0.1", 0)
    with connected(server) as early, connected(server) as slow, server:
        early.sendall(GET)
        assert early.recv(4096), "it listens before it answers"
        slow.sendall(GET.replace(b"hello", b"endless"))
        assert slow.recv(10)
        server.close()
    Server(APP, "127.0.0.1", server.port).close()
    assert threading.active_count() == before


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="no IPv6 here")
def test_an_ipv6_address_is_written_in_brackets() -> None:
    with Server(APP, "::1", 0) as server:
        assert server.origin == f"http://[::1]:{server.port}"
        assert greeted(server)
