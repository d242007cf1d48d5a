"""The `openenv` environment: each episode is a session with an OpenEnv server, and its rewards add up to the score."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal
from urllib.parse import urlsplit

import httpx
from pydantic import field_validator

from retrain.api import EpisodeResult, Example, LoadedData, PluginContext, Score, Table, key
from retrain_rewards.environments.episode import Episode, TurnLimitError
from retrain_rewards.environments.loop import EpisodeLoop, PlayedEnvironment, Settings, require_library
from retrain_rewards.faults import refused

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection


class OpenEnvTable(Table):
    """`[environment] args` of the provider `openenv`."""

    url: str = key("", "The server, for example http://127.0.0.1:8000.", validate_default=True)
    prompt: str = key("", "Text for the policy before the first observation.")
    action: str = key("", "Field of the action that takes the policy's text; empty = as the server's schema suggests.")
    observation: str = key("", "Field of the observation that the policy sees; empty = its text, or all as JSON.")
    tasks: int = key(100, "Tasks: resets with the seeds from 0.", ge=1, le=1_000_000)
    reset: dict[str, Any] = key({}, "Further arguments of every reset.")
    max_sessions: int = key(0, "Episodes at the same time, each in a session; 0 = all of a step.", ge=0)
    call_timeout_s: float = key(20.0, "Seconds that one reset or step may take.", gt=0.0)
    max_observation_chars: int = key(4000, "Characters of an observation that the policy sees.", ge=1)

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if not re.match(r"https?://[^/\s]", url):
            raise ValueError(f"{url!r} is not a URL: write it as http://HOST:PORT")
        return url.rstrip("/")


OpenEnvSettings = Settings[OpenEnvTable]


class OpenEnvEnvironment(PlayedEnvironment[OpenEnvSettings]):
    """Episodes of an OpenEnv server: each is a separate session with its example's seed, and its rewards add up.

    A text without an action that the server takes is answered with the reason, and earns 0.
    """

    _mapping: ActionMapping  # as the server's schema suggests, from `load` on

    def load(self) -> LoadedData:
        """Return one task per seed; ConfigError without an answering server, or if text cannot express its actions."""
        table = self.settings.table
        try:
            answer = httpx.get(f"{table.url}/schema", timeout=table.call_timeout_s).raise_for_status().json()
            schema: dict[str, Any] = answer["action"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            what = f"no OpenEnv server answers at {_shown(table.url)}: {type(error).__name__}: {error}"
            fix = "start the server, or correct args.url"
            raise refused(self.settings.place, code="environment.no-server", what=what, fix=fix) from error
        try:
            self._mapping = ActionMapping.of(schema, table.action)
        except ValueError as error:
            what, fix = f"args.action: {error}", "name another field in args.action, or leave it out"
            raise refused(self.settings.place, code="environment.action-field", what=what, fix=fix) from error
        settings = self.settings
        self._loop = EpisodeLoop(settings.timeout_s, max_turns=settings.max_turns, at_once=table.max_sessions)
        how = f"its {self._mapping.field!r}" if self._mapping.field else "a JSON object"
        note = f"OpenEnv server {_shown(table.url)}: an action is {how}"
        return LoadedData(examples=tuple(map(self._example, range(table.tasks))), notes=(note,))

    async def _play(self, episode: Episode) -> None:
        table = self.settings.table
        rewards: list[float] = []
        turn_rewards: list[float] = []
        episode.result = rewards, turn_rewards
        async with open_session(table.url, table.call_timeout_s) as ask:
            turn = await ask("reset", {"seed": int(episode.example.reference), **table.reset})
            rewards += turn.rewards
            seen = self.settings.clean(observation_text(turn.observation, table.observation))
            messages = [{"role": "user", "content": "\n\n".join(part for part in (table.prompt, seen) if part)}]
            while not turn.done:
                try:
                    answer = await episode.complete(messages, None, turn.observation.get("state_key"))
                except TurnLimitError:
                    return
                said = answer["choices"][0]["message"]["content"]
                try:
                    turn = await ask("step", self._mapping.action(said))
                    rewards += turn.rewards
                    turn_rewards.append(sum(turn.rewards))
                    seen = observation_text(turn.observation, table.observation)
                except NoActionError as error:
                    rewards.append(0.0)
                    turn_rewards.append(0.0)
                    seen = str(error)
                messages.append({"role": "assistant", "content": said})
                messages.append({"role": "user", "content": self.settings.clean(seen)})

    def _example(self, seed: int) -> Example:
        table = self.settings.table
        arguments = json.dumps([table.url, table.reset, seed], sort_keys=True)
        prompt = {"role": "user", "content": table.prompt or f"(seed {seed})"}
        name = hashlib.blake2b(arguments.encode(), digest_size=8).hexdigest()
        return Example(id=f"openenv-{seed}-{name}", prompt=(prompt,), reference=str(seed), task="openenv")

    def _result(self, episode: Episode) -> EpisodeResult:
        rewards, turn_rewards = episode.result or ((), ())
        if episode.failure or not rewards:
            return EpisodeResult(score=Score.failed(episode.failure or "the server gave no reward"))
        limit = episode.hit_turn_limit
        return EpisodeResult(score=Score.of(sum(rewards)), hit_turn_limit=limit, turn_rewards=tuple(turn_rewards))


def make_openenv(context: PluginContext) -> OpenEnvEnvironment:
    require_library(context, "websockets", "openenv")
    return OpenEnvEnvironment(OpenEnvSettings.of(context, most_chars="max_observation_chars"))


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


OF_EVERY_ACTION = "metadata"  # a field that the server adds to all of its actions
# Bounded, so that a long run of digits does not become a huge number.
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,18})?")
_CASTS = {"string": str, "integer": int, "number": float}


class NoActionError(ValueError):
    """The policy's text holds no action, or one that the server refuses; the message is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMapping:
    """Turns a text into an action: one `field` of a `kind` (string, integer, number), or a JSON object."""

    field: str = ""
    kind: str = ""

    @classmethod
    def of(cls, schema: Mapping[str, Any], field: str = "") -> ActionMapping:
        """Map to the named, the only required or the only field, otherwise to JSON; ValueError for no such field."""
        fields = {name: spec for name, spec in schema.get("properties", {}).items() if name != OF_EVERY_ACTION}
        if field and field not in fields:
            raise ValueError(f"the actions have no field {field!r}, only: {', '.join(fields) or 'none'}")
        required = [name for name in schema.get("required", ()) if name in fields]
        single = required if len(required) == 1 else list(fields) if len(fields) == 1 else []
        name = field or (single[0] if single else "")
        kind = str(fields[name].get("type", "")) if name else ""
        if field and kind not in _CASTS:
            raise ValueError(f"field {field!r} of the actions is no text and no number: let the policy write JSON")
        return cls(field=name, kind=kind) if kind in _CASTS else cls()

    def action(self, text: str) -> dict[str, Any]:
        """Return the last number of a text, or its JSON object; NoActionError without one."""
        if self.kind == "string":
            return {self.field: text}
        if self.field:
            numbers = _NUMBER.findall(text)
            if not numbers or (self.kind == "integer" and "." in numbers[-1]):
                raise NoActionError(f"error: answer with {'a whole number' if self.kind == 'integer' else 'a number'}")
            return {self.field: _CASTS[self.kind](numbers[-1])}
        try:
            action = json.loads(text[text.find("{") : text.rfind("}") + 1])
        except (ValueError, RecursionError):
            action = None
        if not isinstance(action, dict):
            raise NoActionError("error: answer with a JSON object")
        return action


def observation_text(observation: Mapping[str, Any], field: str = "") -> str:
    if field:
        value = observation.get(field, "")
        return value if isinstance(value, str) else json.dumps(value)
    texts = [value for value in observation.values() if isinstance(value, str) and value]
    return texts[0] if len(texts) == 1 else json.dumps(dict(observation))


MAX_MESSAGE_BYTES = 2**24
CLOSE_TIMEOUT_S = 2.0
ON_THIS_MACHINE = frozenset({"localhost", "127.0.0.1", "::1"})


class ServerError(RuntimeError):
    """The server cannot be reached, does not answer in time, or says that it failed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    observation: Mapping[str, Any]
    rewards: tuple[float, ...]
    done: bool


async def _ask(socket: ClientConnection, timeout_s: float, kind: str, data: Mapping[str, Any]) -> Turn:
    from websockets.exceptions import ConnectionClosed, WebSocketException

    try:
        async with asyncio.timeout(timeout_s):
            # It may have said why before it closed.
            with suppress(ConnectionClosed):
                await socket.send(json.dumps({"type": kind, "data": dict(data)}))
            answer = json.loads(await socket.recv())
    except TimeoutError as error:
        raise ServerError(f"the server took longer than {timeout_s:g} s for a {kind}") from error
    except WebSocketException as error:
        raise ServerError(f"the server ended the session: {error}") from error
    except ValueError as error:
        raise ServerError("the server sent something other than JSON") from error
    return _turn(answer)


@asynccontextmanager
async def open_session(
    url: str, timeout_s: float
) -> AsyncIterator[Callable[[str, Mapping[str, Any]], Awaitable[Turn]]]:
    """Open a session and yield a function that sends `reset` or `step` with data; ServerError for every failure."""
    from websockets.asyncio.client import connect
    from websockets.exceptions import WebSocketException

    parts = urlsplit(url)
    target = parts._replace(scheme="wss" if parts.scheme == "https" else "ws", path=f"{parts.path}/ws").geturl()
    # A proxy from the environment cannot reach a server on this machine.
    proxy: Literal[True] | None = None if parts.hostname in ON_THIS_MACHINE else True
    try:
        socket = await connect(target, open_timeout=timeout_s, max_size=MAX_MESSAGE_BYTES, proxy=proxy)
    except (OSError, WebSocketException, TimeoutError) as error:
        raise ServerError(f"no session with {parts.hostname}:{parts.port or parts.scheme}: {error}") from error
    try:
        yield partial(_ask, socket, timeout_s)
    finally:
        with suppress(WebSocketException, TimeoutError):
            # The server then closes its side by itself, and frees the session at once.
            await socket.send(json.dumps({"type": "close"}))
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
            raise NoActionError(f"error: {named or said}")
        if code == "CAPACITY_REACHED":
            said += " Set args.max_sessions to its limit, or raise its max_concurrent_envs."
        raise ServerError(f"the server says: {said} ({code})")
    reward, observation = data.get("reward"), data.get("observation")
    if reward is not None and not (isinstance(reward, int | float) and math.isfinite(reward)):
        raise ServerError(f"the reward is {str(reward)[:100]}, not a finite number")
    if not isinstance(observation, dict):
        raise ServerError(f"the observation is {str(observation)[:100]}, not an object")
    rewards = () if reward is None else (float(reward),)
    return Turn(observation=observation, rewards=rewards, done=bool(data.get("done")))
