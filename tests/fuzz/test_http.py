"""Damaged requests over a socket: each of 10,000 is answered or its connection closed, and the server goes on."""

from __future__ import annotations

import json
import logging
import random
import socket
import threading

import pytest

from retrain.api import load_plugins
from retrain.run.opened import opened
from retrain.run.subject import find_subject
from retrain.use.serving.batcher import Batcher
from retrain.use.serving.http import CHATS, COMPLETIONS, RESPONSES, ApiServer, with_token
from retrain.use.serving.service import Service
from tests.fuzz.test_fuzz import CHAT, COMPLETION, INPUTS, RESPONSE, mutated

pytestmark = pytest.mark.long
REQUESTS = ((CHATS, CHAT), (COMPLETIONS, COMPLETION), (RESPONSES, RESPONSE))
SHORT = ["--max-tokens=4", "--data-instruction=", "--reward-type=math", "--backend=local"]


def request(path: str, body: bytes, length: int) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n"
    return head.encode() + b"Connection: close\r\n\r\n" + body


def answer_to(address: tuple[str, int], data: bytes, *, is_whole: bool) -> bytes:
    """All that comes back; a request that may be cut ends with our side of the connection, or the server would wait."""
    parts = []
    with socket.create_connection(address, timeout=30) as client:
        try:
            client.sendall(data)
            if not is_whole:
                client.shutdown(socket.SHUT_WR)
            while part := client.recv(1 << 16):
                parts.append(part)
        except OSError as error:
            if is_whole or isinstance(error, TimeoutError):
                raise  # else the server has closed the connection before it had all
    return b"".join(parts)


@pytest.mark.timeout(1200)
def test_damaged_requests_are_answered_and_the_server_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="retrain")
    rng = random.Random("fuzz http")
    with opened(find_subject("builtin:tiny"), load_plugins(), SHORT) as source:
        batcher = Batcher(source.backend, lambda model: source.use(None))
        with ApiServer("127.0.0.1", 0, with_token(Service(source, {"m": None}, batcher), "")) as server:
            address = (server.host, server.port)
            thread = threading.Thread(target=batcher.run)
            thread.start()
            try:
                for count in range(INPUTS):
                    path, content = rng.choice(REQUESTS)
                    body, is_whole = json.dumps(content).encode(), bool(count % 2)
                    if is_whole:
                        body = mutated(body, rng)
                    data = request(path, body, len(body))
                    found = answer_to(address, data if is_whole else mutated(data, rng), is_whole=is_whole)
                    assert found.startswith(b"HTTP/1.") or not is_whole, data[:2000]
                whole = json.dumps(COMPLETION).encode()
                assert b" 200 " in answer_to(address, request(COMPLETIONS, whole, len(whole)), is_whole=True)[:20]
            finally:
                batcher.close()
                thread.join()
    faults = [record for record in caplog.records if record.exc_info]
    assert not faults, faults[0].exc_info
