"""`[environment] args` of the provider `mcp`, read without its library."""

from __future__ import annotations

import re

from pydantic import field_validator, model_validator

from retrain.api import Table, key
from retrain_rewards.environments.loop import Settings


class ServerTable(Table):
    """One server, started as a process that speaks on stdio, or reached by URL."""

    command: list[str] = key([], "The program that serves on stdio, and its arguments.")
    cwd: str = key("", "Its folder; empty = the run's.")
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
    isolate: bool = key(False, "Every episode has its own servers, instead of all sharing one of each.")
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


McpSettings = Settings[McpTable]
