"""The `mcp` environment: the policy calls tools until it answers in plain text, and the run's reward judges that."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any

from retrain.api import EpisodeResult, Example, LoadedData, Message, PluginContext, Score
from retrain_rewards.environments.episode import Episode, TurnLimitError
from retrain_rewards.environments.loop import EpisodeLoop, PlayedEnvironment, require_library
from retrain_rewards.environments.mcp_settings import McpSettings
from retrain_rewards.faults import refused
from retrain_rewards.tables import reward_names

CALL_MARK = "<tool_call>"
NO_CALL = 'error: the text between <tool_call> and </tool_call> must be JSON with "name" and "arguments", an object'


class McpEnvironment(PlayedEnvironment[McpSettings]):
    """Episodes over the tasks of `[data]` with the tools of MCP servers; a shared one that has died starts again."""

    _shared: Any = None  # SharedServers, whose module imports the library

    def load(self) -> LoadedData:
        """Return no examples, but a note of the tools; ConfigError when a server cannot be used."""
        from retrain_rewards.environments.mcp_servers import ServerDiedError, SharedServers

        settings, table = self.settings, self.settings.table
        at_once = table.max_isolated if table.isolate else 0
        self._loop = EpisodeLoop(settings.timeout_s, max_turns=settings.max_turns, at_once=at_once)
        self._shared = SharedServers(self.settings)

        async def tools() -> dict[str, list[str]]:
            async with self._toolbox() as toolbox:
                names: dict[str, list[str]] = toolbox.names
            return names

        try:
            names = self._loop.run(tools())
        except ServerDiedError as error:
            fix = "start the server by hand to see its output, or correct args"
            what = f"an MCP server cannot be used: {error}"
            raise refused(self.settings.place, code="environment.server-unusable", what=what, fix=fix) from error
        notes = tuple(f"MCP server {server!r}: {', '.join(tools)}" for server, tools in names.items())
        return LoadedData(examples=(), notes=notes)

    async def _play(self, episode: Episode) -> None:
        async with self._toolbox() as toolbox:
            messages = self._opening(episode.example)
            while True:
                try:
                    said = (await episode.complete(messages, toolbox.schemas))["choices"][0]["message"]
                except TurnLimitError:
                    return
                messages.append(said)
                episode.result = said["content"]
                results = await self._answers(toolbox, said)
                if not results:
                    return
                messages += results

    async def _answers(self, toolbox: Any, said: Mapping[str, Any]) -> list[dict[str, Any]]:
        calls, limit = said.get("tool_calls", ()), self.settings.table.max_calls
        made = [toolbox.call(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in calls[:limit]]
        results = await asyncio.gather(*made, return_exceptions=True)  # the first exception once every call has ended
        if errors := [result for result in results if isinstance(result, BaseException)]:
            raise errors[0]
        texts = [*map(str, results), *[f"error: more than {limit} calls in one turn"] * len(calls[limit:])]
        clean = self.settings.clean
        messages = [
            {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": clean(text)}
            for call, text in zip(calls, texts, strict=True)
        ]
        return [*messages, {"role": "tool", "content": NO_CALL}] if CALL_MARK in said["content"] else messages

    def _opening(self, example: Example) -> list[Message]:
        if not isinstance(example.prompt, str):
            return list(example.prompt)
        parts = [example.prompt, self.settings.instruction]
        user = {"role": "user", "content": "\n".join(part for part in parts if part)}
        system = self.settings.system_prompt
        return [{"role": "system", "content": system}, user] if system else [user]

    def _toolbox(self) -> AbstractAsyncContextManager[Any]:
        """Return the servers of one episode, or the shared ones."""
        from retrain_rewards.environments.mcp_servers import open_toolbox

        return open_toolbox(self.settings) if self.settings.table.isolate else self._shared.use()

    def _result(self, episode: Episode) -> EpisodeResult:
        if episode.failure:
            return EpisodeResult(score=Score.failed(episode.failure))
        return EpisodeResult(answer=str(episode.result or ""), hit_turn_limit=episode.hit_turn_limit)


def make_mcp(context: PluginContext) -> McpEnvironment:
    require_library(context, "mcp", "mcp")
    if "none" in reward_names(context.config):
        what, fix = "reward 'none' judges no answer", "choose the reward that judges the episodes' last answers"
        where = context.config.place("reward.type")
        raise refused(where, code="environment.no-reward", what=what, fix=fix)
    return McpEnvironment(McpSettings.of(context, most_chars="max_result_chars"))
