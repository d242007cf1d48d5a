"""The `openenv` environment: each episode is a session with an OpenEnv server, and its rewards add up to the score."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx
from pydantic import field_validator

from retrain.api import ConfigError, EpisodeResult, Example, LoadedData, PluginContext, Problem, Score, Table, key
from retrain_rewards.environments.arguments import Settings, require_library
from retrain_rewards.environments.episode import Episode, TurnLimitError
from retrain_rewards.environments.loop import EpisodeLoop, PlayedEnvironment


class OpenEnvTable(Table):
    """`[environment] args` of the provider `openenv`."""

    url: str = key("", "The server, for example http://127.0.0.1:8000.", validate_default=True)
    prompt: str = key("", "What the policy is told before the first observation.")
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
            raise ValueError(f"{url!r} is no URL: write it as http://HOST:PORT")
        return url.rstrip("/")


OpenEnvSettings = Settings[OpenEnvTable]


class OpenEnvEnvironment(PlayedEnvironment[OpenEnvSettings]):
    """Episodes of an OpenEnv server: each is a session of its own with its example's seed, and its rewards add up.

    A text that holds no action that the server takes is answered with what is wrong, and earns 0.
    """

    _mapping: ActionMapping  # as the server's schema suggests, from `load` on

    def load(self) -> LoadedData:
        """One task per seed; ConfigError when the server does not answer or its actions cannot be written as text."""
        table = self.settings.table
        schema = self._action_schema()
        try:
            self._mapping = ActionMapping.of(schema, table.action)
        except ValueError as error:
            fix = "name another field in args.action, or leave it out"
            raise ConfigError(Problem(where=self.settings.place, what=str(error), fix=fix)) from error
        limits = self.settings.limits
        self._loop = EpisodeLoop(limits.timeout_s, max_turns=limits.max_turns, at_once=table.max_sessions)
        how = f"its {self._mapping.field!r}" if self._mapping.field else "a JSON object"
        note = f"OpenEnv server {_shown(table.url)}: an action is {how}"
        return LoadedData(examples=tuple(map(self._example, range(table.tasks))), notes=(note,))

    async def _play(self, episode: Episode) -> None:
        from retrain_rewards.environments.openenv_client.session import RefusedActionError, open_session

        table = self.settings.table
        rewards: list[float] = []
        episode.result = rewards
        async with open_session(table.url, table.call_timeout_s) as session:
            turn = await session.reset({"seed": int(episode.example.reference), **table.reset})
            rewards += turn.rewards
            seen = self.settings.clean(observation_text(turn.observation, table.observation))
            messages = [{"role": "user", "content": "\n\n".join(part for part in (table.prompt, seen) if part)}]
            while not turn.done:
                try:
                    said = (await episode.complete(messages, None))["choices"][0]["message"]["content"]
                except TurnLimitError:
                    return
                try:
                    turn = await session.step(self._mapping.action(said))
                    rewards += turn.rewards
                    seen = observation_text(turn.observation, table.observation)
                except (NoActionError, RefusedActionError) as error:
                    rewards.append(0.0)
                    seen = str(error)
                messages.append({"role": "assistant", "content": said})
                messages.append({"role": "user", "content": self.settings.clean(seen)})

    def _example(self, seed: int) -> Example:
        """The prompt in the records; what the policy sees first is the server's own observation."""
        table = self.settings.table
        arguments = json.dumps([table.url, table.reset, seed], sort_keys=True)
        prompt = {"role": "user", "content": table.prompt or f"(seed {seed})"}
        name = hashlib.blake2b(arguments.encode(), digest_size=8).hexdigest()
        return Example(id=f"openenv-{seed}-{name}", prompt=(prompt,), reference=str(seed), task="openenv")

    def _action_schema(self) -> dict[str, Any]:
        url, limit_s = self.settings.table.url, self.settings.table.call_timeout_s
        try:
            answer = httpx.get(f"{url}/schema", timeout=limit_s).raise_for_status().json()
            schema: dict[str, Any] = answer["action"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            what = f"no OpenEnv server answers at {_shown(url)}: {type(error).__name__}: {error}"
            fix = "start the server, or correct args.url"
            raise ConfigError(Problem(where=self.settings.place, what=what, fix=fix)) from error
        return schema

    def _result(self, episode: Episode) -> EpisodeResult:
        if episode.failure or not episode.result:
            return EpisodeResult(score=Score.failed(episode.failure or "the server gave no reward"))
        return EpisodeResult(score=Score.of(sum(episode.result)), hit_turn_limit=episode.hit_turn_limit)


def make_openenv(context: PluginContext) -> OpenEnvEnvironment:
    """The environment that `[environment] args` describes; ConfigError on faults found without asking the server."""
    require_library(context, "websockets", "openenv")
    return OpenEnvEnvironment(OpenEnvSettings.of(context, OpenEnvTable, most_chars="max_observation_chars"))


def _shown(url: str) -> str:
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()


OF_EVERY_ACTION = "metadata"  # a field that the server adds to all of its actions
_NUMBER = re.compile(r"-?\d{1,18}(?:\.\d{1,18})?")
_CASTS = {"string": str, "integer": int, "number": float}


class NoActionError(ValueError):
    """The policy's text holds no action of this kind; the message is for the policy."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActionMapping:
    """How a text becomes an action: into one `field` of a `kind` (string, integer, number), or as a JSON object."""

    field: str = ""
    kind: str = ""

    @classmethod
    def of(cls, schema: Mapping[str, Any], field: str = "") -> ActionMapping:
        """For the field that is named, else for the only one that must be given, or the only one; else JSON.

        ValueError when the schema has no field of that name, or one that text cannot fill.
        """
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
        """The action; a number is the last one in the text, an object goes from its first brace to its last.

        NoActionError when there is none.
        """
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
    """The field that is named, else the only text in the observation, else all of it as JSON."""
    if field:
        value = observation.get(field, "")
        return value if isinstance(value, str) else json.dumps(value)
    texts = [value for value in observation.values() if isinstance(value, str) and value]
    return texts[0] if len(texts) == 1 else json.dumps(dict(observation))
