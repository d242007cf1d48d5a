"""`[environment] args` of the provider `openenv`, as plain data that can be sent to another process."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import field_validator

from retrain.api import PluginContext, Table, key
from retrain_rewards.episodes.arguments import Limits, arguments_of
from retrain_rewards.episodes.untrusted import Cleaner


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEnvSettings:
    """What the environment needs of the configuration."""

    table: OpenEnvTable
    clean: Cleaner
    places: Mapping[str, str]  # of `args` and `args.url`, for messages
    limits: Limits = field(default_factory=Limits)

    @classmethod
    def of(cls, context: PluginContext) -> OpenEnvSettings:
        """The settings of a run; ConfigError on every fault that shows without asking the server."""
        config = context.config
        table = arguments_of(context, OpenEnvTable)
        return cls(
            table=table,
            clean=Cleaner.of(context.tokenizer, table.max_observation_chars),
            places={name: config.place(f"environment.{name}") for name in ("args", "provider")},
            limits=Limits.of(context, table.call_timeout_s),
        )
