"""A stand-in for a server of OpenEnv: guess a number. `test_openenv.py` holds it and the real package together."""

import asyncio
import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from websockets.asyncio.server import ServerConnection, serve
from websockets.datastructures import Headers
from websockets.http11 import Request, Response

LOWEST, HIGHEST = 100, 140
QUESTION = f"Guess my number, {LOWEST} to {HIGHEST}."
BOOM = 99  # a number that breaks the game
SCHEMA = {
    "action": {
        "properties": {"metadata": {"type": "object"}, "number": {"type": "integer"}},
        "required": ["number"],
        "additionalProperties": False,
    }
}


def secret_of(seed: int) -> int:
    """The number to be guessed."""
    return random.Random(seed).randint(LOWEST, HIGHEST)


@dataclass
class Game:
    """One session's game."""

    capacity: int = 0
    schema: dict[str, Any] = field(default_factory=lambda: dict(SCHEMA))
    num_open: int = 0
    most_open: int = 0

    async def session(self, socket: ServerConnection) -> None:
        """Answer the messages of one session."""
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        secret = 0
        try:
            if self.capacity and self.num_open > self.capacity:
                await socket.send(_error("CAPACITY_REACHED", f"at capacity: {self.capacity}"))
                return
            async for raw in socket:
                message = json.loads(raw)
                if message["type"] == "close":
                    return
                if message["type"] == "reset":
                    secret = secret_of(message["data"]["seed"])
                    await socket.send(_turn(QUESTION, None, done=False))
                else:
                    await socket.send(_stepped(message["data"], secret))
        finally:
            self.num_open -= 1

    def page(self, socket: ServerConnection, request: Request) -> Response | None:
        """The schema of its actions; None for a session."""
        if request.path == "/ws":
            return None
        status = HTTPStatus.OK if request.path == "/schema" else HTTPStatus.NOT_FOUND
        body = json.dumps(self.schema).encode()
        headers = Headers({"Content-Length": str(len(body)), "Content-Type": "application/json", "Connection": "close"})
        return Response(status.value, status.phrase, headers, body)


@contextmanager
def serving(game: Game | None = None) -> Iterator[str]:
    """The URL of a server in a thread of its own."""
    game, loop = game or Game(), asyncio.new_event_loop()
    started: list[int] = []

    async def listen() -> None:
        async with serve(game.session, "127.0.0.1", 0, process_request=game.page) as server:
            started.append(server.sockets[0].getsockname()[1])
            ready.set()
            await stop.wait()

    ready, stop = threading.Event(), asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(listen()), daemon=True)
    thread.start()
    assert ready.wait(60.0)
    try:
        yield f"http://127.0.0.1:{started[0]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(60.0)


def _stepped(action: dict[str, Any], secret: int) -> str:
    number = action.get("number")
    if set(action) != {"number"} or not isinstance(number, int):
        return _error("VALIDATION_ERROR", "Invalid message", [{"loc": ["number"], "msg": "Field required"}])
    if number == BOOM:
        return _error("EXECUTION_ERROR", "boom")
    hint = "right" if number == secret else "higher" if secret > number else "lower"
    return _turn(hint, float(number == secret), done=number == secret)


def _turn(hint: str, reward: float | None, *, done: bool) -> str:
    return json.dumps({"type": "observation", "data": {"observation": {"hint": hint}, "reward": reward, "done": done}})


def _error(code: str, message: str, errors: list[Any] | None = None) -> str:
    return json.dumps({"type": "error", "data": {"message": message, "code": code, "errors": errors or []}})
