"""The table `[environment]` as plain data that can be sent to another process."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from retrain.api import ConfigError, PluginContext, Problem

ENDLESS_TASKS = 1000  # taken from an endless taskset, unless the run wants more
_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*(?:@\w[\w.+-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`[environment]`, checked as far as possible without the library.

    `timeout_s` limits the time between two turns of all episodes together, and the time to score them. `seed` is
    derived from the run's. `places` says where each key was set, for messages.
    """

    id: str
    args: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = -1
    auto_install: bool = False
    timeout_s: float = 60.0
    seed: int = 0
    endless_tasks: int = ENDLESS_TASKS
    places: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, context: PluginContext) -> Settings:
        """The table of this run; ConfigError lists every fault."""
        config = context.config
        names = ("id", "args", "max_turns", "auto_install", "timeout_s")
        settings = cls(
            id=config.environment.id,
            args=dict(config.environment.args),
            max_turns=config.environment.max_turns,
            auto_install=config.environment.auto_install,
            timeout_s=config.environment.timeout_s,
            seed=context.seeds.derive("environment"),
            endless_tasks=max(ENDLESS_TASKS, config.training.max_examples + config.eval.examples),
            places={name: config.place(f"environment.{name}") for name in names},
        )
        problems = settings._problems()
        if problems:
            raise ConfigError(*problems)
        return settings

    @property
    def hub_id(self) -> str:
        """`owner/name`, with the version if the id has one; empty for an id without an owner."""
        return self.id if "/" in self.id else ""

    @property
    def name(self) -> str:
        """The id without owner and version."""
        return self.id.rsplit("/", 1)[-1].split("@", 1)[0]

    @property
    def library_id(self) -> str:
        """The id for the library's loaders, without the version."""
        return self.id.split("@", 1)[0]

    def problem(self, key: str, what: str, *, why: str = "", fix: str = "") -> ConfigError:
        where = self.places.get(key, f"[environment] {key}")
        return ConfigError(Problem(where=where, what=what, why=why, fix=fix))

    def _problems(self) -> list[Problem]:
        found = []
        if not self.id:
            fix = 'set id, for example id = "primeintellect/gsm8k"'
            found.append(self.problem("id", "is empty, but provider is verifiers", fix=fix))
        elif _ID.fullmatch(self.id) is None:
            fix = 'write "name", "owner/name" or "owner/name@version"'
            found.append(self.problem("id", f"{self.id!r} is not the id of an environment", fix=fix))
        if self.max_turns == 0:
            fix = "use 1 or more, or -1 for as many as the environment allows"
            found.append(self.problem("max_turns", "0 turns leave nothing to play", fix=fix))
        try:
            json.dumps(self.args, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            fix = "use text, numbers, booleans, lists and tables only"
            found.append(self.problem("args", f"is not plain data: {error}", fix=fix))
        return [problem for error in found for problem in error.problems]
