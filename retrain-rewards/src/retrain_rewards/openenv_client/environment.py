"""The `openenv` environment: each episode is a session with an OpenEnv server, and its rewards add up to the score."""

from __future__ import annotations

import hashlib
import json
from typing import Any
from urllib.parse import urlsplit

import httpx

from retrain.api import (
    ConfigError,
    EpisodeResult,
    Example,
    LoadedData,
    Message,
    PluginContext,
    Problem,
    Score,
)
from retrain_rewards.episodes.arguments import require_library
from retrain_rewards.episodes.environment import PlayedEnvironment
from retrain_rewards.episodes.episode import Episode, TurnLimitError
from retrain_rewards.episodes.loop import EpisodeLoop
from retrain_rewards.openenv_client.mapping import ActionMapping, NoActionError, observation_text
from retrain_rewards.openenv_client.settings import OpenEnvSettings


class OpenEnvEnvironment(PlayedEnvironment[OpenEnvSettings]):
    """Episodes of an OpenEnv server: each is a session of its own with its example's seed, and its rewards add up.

    A text that holds no action that the server takes is answered with what is wrong, and earns 0.
    """

    def __init__(self, settings: OpenEnvSettings) -> None:
        super().__init__(settings)
        self.max_turns = settings.limits.max_turns
        self._mapping = ActionMapping()

    def load(self) -> LoadedData:
        """One task per seed; ConfigError when the server does not answer or its actions cannot be written as text."""
        table = self.settings.table
        schema = self._action_schema()
        try:
            self._mapping = ActionMapping.of(schema, table.action)
        except ValueError as error:
            fix = "name another field in args.action, or leave it out"
            raise ConfigError(Problem(where=self.settings.places["args"], what=str(error), fix=fix)) from error
        self._loop = EpisodeLoop(self.settings.limits.timeout_s, at_once=table.max_sessions)
        how = f"its {self._mapping.field!r}" if self._mapping.field else "a JSON object"
        note = f"OpenEnv server {_shown(table.url)}: an action is {how}"
        return LoadedData(examples=tuple(map(self._example, range(table.tasks))), notes=(note,))

    async def _play(self, episode: Episode) -> None:
        from retrain_rewards.openenv_client.session import RefusedActionError, open_session

        table = self.settings.table
        rewards: list[float] = []
        episode.result = rewards
        async with open_session(table.url, table.call_timeout_s) as session:
            turn = await session.reset({"seed": int(episode.example.reference), **table.reset})
            rewards += turn.rewards
            messages = self._opening(observation_text(turn.observation, table.observation))
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
                messages += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": self.settings.clean(seen)},
                ]

    def _opening(self, seen: str) -> list[dict[str, Any]]:
        parts = (self.settings.table.prompt, self.settings.clean(seen))
        return [{"role": "user", "content": "\n\n".join(part for part in parts if part)}]

    def _example(self, seed: int) -> Example:
        """The prompt in the records; what the policy sees first is the server's own observation."""
        table = self.settings.table
        arguments = json.dumps([table.url, table.reset, seed], sort_keys=True)
        prompt: tuple[Message, ...] = ({"role": "user", "content": table.prompt or f"(seed {seed})"},)
        name = hashlib.blake2b(arguments.encode(), digest_size=8).hexdigest()
        return Example(id=f"openenv-{seed}-{name}", prompt=prompt, reference=str(seed), task="openenv")

    def _action_schema(self) -> dict[str, Any]:
        url, limit_s = self.settings.table.url, self.settings.table.call_timeout_s
        try:
            answer = httpx.get(f"{url}/schema", timeout=limit_s).raise_for_status().json()
            schema: dict[str, Any] = answer["action"]
        except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
            what = f"no OpenEnv server answers at {_shown(url)}: {type(error).__name__}: {error}"
            fix = "start the server, or correct args.url"
            raise ConfigError(Problem(where=self.settings.places["args"], what=what, fix=fix)) from error
        return schema

    def _result(self, episode: Episode) -> EpisodeResult:
        if episode.failure or not episode.result:
            return EpisodeResult(score=Score.failed(episode.failure or "the server gave no reward"))
        return EpisodeResult(score=Score.of(sum(episode.result)), hit_turn_limit=episode.hit_turn_limit)


def make_openenv(context: PluginContext) -> OpenEnvEnvironment:
    """The environment that `[environment] args` describes; ConfigError on faults found without asking the server."""
    require_library(context, "websockets", "openenv")
    return OpenEnvEnvironment(OpenEnvSettings.of(context))


def _shown(url: str) -> str:
    """The URL without login and query."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="").geturl()
