"""A judge for tests: a real HTTP server on this machine that answers as each test says."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from retrain.api import Example, Score
from tests.kit import http_handler
from tests.kit.http_handler import in_a_thread

KEY = "sk-plantedPLANTED0123"
EXAMPLE = Example(id="e", prompt="What is 2 + 3?", reference="5")
LONG_S = 60.0

Answer = Callable[["Handler"], None]


class Handler(http_handler.Handler):
    """One request; `server.answers` are used up one by one, the last one again and again."""

    server: JudgeServer

    def do_POST(self) -> None:
        self.asked = json.loads(self.body())
        with self.server.lock:
            self.server.requests.append({"path": self.path, "headers": self.headers, **self.asked})
            self.server.busy += 1
            self.server.most_busy = max(self.server.most_busy, self.server.busy)
            number = min(len(self.server.requests), len(self.server.answers)) - 1
        try:
            self.server.answers[number](self)
        finally:
            with self.server.lock:
                self.server.busy -= 1


class JudgeServer(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, *answers: Answer) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.answers = answers
        self.lock = threading.Lock()
        self.requests: list[dict[str, Any]] = []
        self.busy = self.most_busy = 0
        self.released = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    @property
    def prompts(self) -> list[str]:
        """What the judge was shown, request by request."""
        return [request["messages"][0]["content"] for request in self.requests]

    def handle_error(self, request: object, client_address: object) -> None:
        """A caller that hangs up is what some tests are about."""


@contextmanager
def serving(*answers: Answer) -> Iterator[JudgeServer]:
    server = JudgeServer(*answers)
    with in_a_thread(server, end=server.released.set):
        yield server


def completion(text: object, **changes: object) -> bytes:
    """The body of a chat completion that says `text`."""
    choice = {"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 20, "total_tokens": 120}
    body = {"id": "1", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice], "usage": usage}
    return json.dumps({**body, **changes}).encode()


def says(text: object, **changes: object) -> Answer:
    return lambda handler: handler.send(200, completion(text, **changes))


def raw(body: bytes, status: int = 200, **headers: str) -> Answer:
    return lambda handler: handler.send(status, body, **headers)


def fails(status: int, message: str = "no", **headers: str) -> Answer:
    return raw(json.dumps({"error": {"message": message}}).encode(), status, **headers)


def echoes(handler: Handler) -> None:
    handler.send(200, completion(handler.asked["messages"][0]["content"]))


def hangs(handler: Handler) -> None:
    handler.server.released.wait(30)
    handler.close_connection = True


def hangs_up(handler: Handler) -> None:
    handler.close_connection = True
    handler.connection.close()


def drips(handler: Handler) -> None:
    """A byte now and then, for ever."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000000")
    handler.end_headers()
    while not handler.server.released.wait(0.02):
        handler.wfile.write(b" ")


def takes(seconds: float, answer: Answer) -> Answer:
    def slow(handler: Handler) -> None:
        time.sleep(seconds)
        answer(handler)

    return slow


YES = says("Both are 5.\nVERDICT: yes")


def run(reward: Any, *texts: str, timeout_s: float = LONG_S) -> list[Score]:
    """Score all texts at once, as many at a time as the reward allows, each within the limit."""

    async def scored() -> list[Score]:
        slots = asyncio.Semaphore(reward.concurrency)

        async def one(text: str) -> Score:
            async with slots:
                return await asyncio.wait_for(reward.score(EXAMPLE, text), timeout_s)

        try:
            return await asyncio.gather(*(one(text) for text in texts))
        finally:
            await reward.close()

    return asyncio.run(scored())
