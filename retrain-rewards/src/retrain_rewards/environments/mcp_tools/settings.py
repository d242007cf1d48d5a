"""`[environment] args` of the provider `mcp`, as plain data that can be sent to another process."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from pydantic import field_validator, model_validator

from retrain.api import ConfigError, PluginContext, Problem, Table, key
from retrain_rewards.environments.arguments import Limits, arguments_of
from retrain_rewards.environments.messages import Cleaner
from retrain_rewards.tables import reward_names


class ServerTable(Table):
    """One server, started as a process that speaks on stdio, or reached by URL."""

    command: list[str] = key([], "The program that serves on stdio, and its arguments.")
    cwd: str = key("", "Its folder; empty = that of the run.")
    env: dict[str, str] = key({}, "Environment variables that it gets.")
    pass_env: list[str] = key([], "Variables of the run's own environment that it gets, by name: its keys and tokens.")
    url: str = key("", "Instead of a command: the URL of a streamable HTTP server.")
    headers_env: dict[str, str] = key({}, "HTTP headers, each with the environment variable that holds its value.")
    tools: list[str] = key([], "Its tools that the policy may call; empty = all.")

    @field_validator("url")
    @classmethod
    def _is_http(cls, url: str) -> str:
        if url and not re.match(r"https?://[^/\s]", url):
            raise ValueError(f"{url!r} is no http:// or https:// URL")
        return url

    @model_validator(mode="after")
    def _one_way_to_reach_it(self) -> ServerTable:
        if bool(self.command) == bool(self.url):
            raise ValueError("a server needs either a command or a url")
        if self.url and (self.env or self.pass_env or self.cwd):
            raise ValueError("env, pass_env and cwd are for a server with a command")
        if self.command and self.headers_env:
            raise ValueError("headers_env is for a server with a url")
        return self


class McpTable(Table):
    """`[environment] args` of the provider `mcp`."""

    servers: dict[str, ServerTable] = key({}, "The servers, by name.", validate_default=True)
    isolate: bool = key(False, "Every episode has servers of its own, instead of all sharing one of each.")
    max_isolated: int = key(16, "With isolate: episodes at the same time; 0 = all of a step.", ge=0)
    call_timeout_s: float = key(20.0, "Seconds that one call of a tool may take.", gt=0.0)
    max_calls: int = key(8, "Calls that one turn may make; the others get an error.", ge=1)
    max_result_chars: int = key(4000, "Characters of a result that the policy sees.", ge=1)

    @field_validator("servers")
    @classmethod
    def _any(cls, servers: dict[str, ServerTable]) -> dict[str, ServerTable]:
        if not servers:
            raise ValueError('name at least one, for example servers = { files = { command = ["my-server"] } }')
        return servers


@dataclass(frozen=True, slots=True, kw_only=True)
class McpSettings:
    """What the environment needs of the configuration."""

    table: McpTable
    clean: Cleaner
    place: str  # of `args`, for messages
    limits: Limits = field(default_factory=Limits)
    system_prompt: str = ""
    instruction: str = ""

    @classmethod
    def of(cls, context: PluginContext) -> McpSettings:
        """The settings of a run; ConfigError on every fault that shows without starting a server."""
        config = context.config
        table = arguments_of(context, McpTable)
        if "none" in reward_names(config):
            what, fix = "reward 'none' judges no answer", "choose the reward that judges the episodes' last answers"
            raise ConfigError(Problem(where=config.place("reward.type"), what=what, fix=fix))
        return cls(
            table=table,
            clean=Cleaner.of(context.tokenizer, table.max_result_chars),
            place=config.place("environment.args"),
            limits=Limits.of(context, table.call_timeout_s),
            system_prompt=config.data.system_prompt,
            instruction=config.data.instruction,
        )
