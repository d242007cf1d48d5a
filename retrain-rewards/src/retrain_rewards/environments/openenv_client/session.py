"""One episode's session with an OpenEnv server: reset and step, as JSON messages over a WebSocket.

The server's own package brings a client too, but with it a web interface and MCP servers; the messages are four.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

MAX_MESSAGE_BYTES = 2**24
CLOSE_TIMEOUT_S = 2.0
ON_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})


class ServerError(RuntimeError):
    """The server cannot be reached, does not answer in time, or says that it failed."""


class RefusedActionError(ValueError):
    """The server says that the action is not one of its own; the message is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """What the server says after a reset or a step, with no or one reward."""

    observation: Mapping[str, Any]
    rewards: tuple[float, ...]
    done: bool


class Session:
    """An open session. Whatever goes wrong is a ServerError, but for an action that the server refuses."""

    def __init__(self, socket: ClientConnection, timeout_s: float) -> None:
        self._socket = socket
        self._timeout_s = timeout_s

    async def reset(self, arguments: Mapping[str, Any]) -> Turn:
        """Start the episode anew; the server ignores arguments that its environment does not take."""
        return await self._ask({"type": "reset", "data": dict(arguments)})

    async def step(self, action: Mapping[str, Any]) -> Turn:
        """Act; RefusedActionError when the action does not fit the server's schema."""
        return await self._ask({"type": "step", "data": dict(action)})

    async def _ask(self, message: Mapping[str, Any]) -> Turn:
        try:
            async with asyncio.timeout(self._timeout_s):
                with suppress(ConnectionClosed):  # it may have said why before it closed
                    await self._socket.send(json.dumps(message))
                answer = json.loads(await self._socket.recv())
        except TimeoutError as error:
            raise ServerError(f"the server took longer than {self._timeout_s:g} s for a {message['type']}") from error
        except WebSocketException as error:
            raise ServerError(f"the server ended the session: {error}") from error
        except ValueError as error:
            raise ServerError("the server sent something other than JSON") from error
        return _turn(answer)


@asynccontextmanager
async def open_session(url: str, timeout_s: float) -> AsyncIterator[Session]:
    """A session of one's own with the server at `url`; it ends with the block. ServerError when it cannot be opened."""
    parts = urlsplit(url)
    target = parts._replace(scheme="wss" if parts.scheme == "https" else "ws", path=f"{parts.path}/ws").geturl()
    proxy: Literal[True] | None = None if parts.hostname in ON_THIS_MACHINE else True
    try:
        socket = await connect(target, open_timeout=timeout_s, max_size=MAX_MESSAGE_BYTES, proxy=proxy)
    except (OSError, WebSocketException, TimeoutError) as error:
        raise ServerError(f"no session with {parts.hostname}:{parts.port or parts.scheme}: {error}") from error
    try:
        yield Session(socket, timeout_s)
    finally:
        with suppress(WebSocketException, TimeoutError):
            await socket.send(json.dumps({"type": "close"}))  # the server then closes its side by itself
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await socket.wait_closed()
        await socket.close()


def _turn(answer: Any) -> Turn:
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict):
        raise ServerError(f"the server sent no message of OpenEnv: {str(answer)[:100]}")
    if answer.get("type") == "error":
        said, code = str(data.get("message", ""))[:500], data.get("code", "")
        if code == "VALIDATION_ERROR":
            faults = [fault for fault in data.get("errors") or () if isinstance(fault, dict)]
            named = "; ".join(f"{'.'.join(map(str, f.get('loc', ())))}: {f.get('msg', '')}" for f in faults)[:500]
            raise RefusedActionError(f"error: {named or said}")
        if code == "CAPACITY_REACHED":
            said += " Set args.max_sessions to what it accepts, or raise its max_concurrent_envs."
        raise ServerError(f"the server says: {said} ({code})")
    reward, observation = data.get("reward"), data.get("observation")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise ServerError(f"the reward is {str(reward)[:100]}, not a finite number")
    if not isinstance(observation, dict):
        raise ServerError(f"the observation is {str(observation)[:100]}, not an object")
    rewards = () if reward is None else (float(reward),)
    return Turn(observation=observation, rewards=rewards, done=bool(data.get("done")))
