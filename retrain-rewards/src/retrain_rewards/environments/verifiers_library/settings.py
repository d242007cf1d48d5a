"""The table `[environment]` as plain data that can be sent to another process."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.api import ConfigError, Example, LoadedData, Message, PluginContext
from retrain_rewards.environments.episode import UnsupportedContentError, plain_data, plain_messages
from retrain_rewards.faults import refused

ENDLESS_TASKS = 1000  # taken from an endless taskset, unless the run wants more
_ID = re.compile(r"(?:\w[\w.-]*/)?\w[\w.-]*(?:@\w[\w.+-]*)?", re.ASCII)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """`[environment]`, checked without the library; `places` say where keys were set."""

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
        faults = []
        if _ID.fullmatch(settings.id) is None:
            fix = 'write "name", "owner/name" or "owner/name@version", for example "primeintellect/gsm8k"'
            what = f"{settings.id!r} is not the id of an environment"
            faults.append(settings.problem("id", code="environment.bad-id", what=what, fix=fix))
        if settings.max_turns == 0:
            what, fix = "0 turns leave nothing to play", "use 1 or more, or -1 for as many as the environment allows"
            faults.append(settings.problem("max_turns", code="environment.no-turns", what=what, fix=fix))
        try:
            json.dumps(settings.args, allow_nan=False)
        except (TypeError, ValueError, RecursionError) as error:
            what, fix = f"is not plain data: {error}", "use only text, numbers, booleans, lists and tables as arguments"
            faults.append(settings.problem("args", code="environment.bad-args", what=what, fix=fix))
        if faults:
            raise ConfigError(*(problem for fault in faults for problem in fault.problems))
        return settings

    @property
    def hub_id(self) -> str:
        """`owner/name`, with the version if the id has one; empty for an id without an owner."""
        return self.id if "/" in self.id else ""

    @property
    def name(self) -> str:
        return self.id.rsplit("/", 1)[-1].split("@", 1)[0]

    @property
    def library_id(self) -> str:
        return self.id.split("@", 1)[0]

    def problem(self, key: str, *, code: str, what: str, why: str = "", fix: str = "") -> ConfigError:
        return refused(self.places.get(key, f"[environment] {key}"), code=code, what=what, why=why, fix=fix)


ID_BYTES = 12


@dataclass(slots=True, kw_only=True)
class Tasks:
    """Gathers the tasks of one environment; `handles` maps an example's id to the library's own task."""

    settings: Settings
    examples: dict[str, Example] = field(default_factory=dict)
    handles: dict[str, Any] = field(default_factory=dict)
    rows: int = 0

    def add(
        self,
        handle: Any,
        *,
        prompt: str | Sequence[Mapping[str, Any]],
        reference: Any,
        task: str,
        info: Mapping[str, Any],
        identity: Mapping[str, Any],
    ) -> None:
        self.rows += 1
        try:
            opening: str | list[Message] = prompt if isinstance(prompt, str) else plain_messages(prompt)
        except UnsupportedContentError as error:
            what = f"{self.settings.id!r} has tasks with {error}; only text is supported"
            fix = "choose an environment of text tasks"
            raise self.settings.problem("id", code="environment.not-text", what=what, fix=fix) from error
        text = json.dumps(dict(identity), sort_keys=True, default=str)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=ID_BYTES).hexdigest()
        name = f"{self.settings.name}-{digest}"
        if name in self.examples:
            return
        answer = reference if isinstance(reference, str) else json.dumps(plain_data(reference))
        self.handles[name] = handle
        self.examples[name] = Example(
            id=name,
            prompt=opening,
            reference="" if reference is None else answer,
            task=task or self.settings.name,
            info=plain_data(dict(info)),
        )

    def loaded(self, origin: str) -> LoadedData:
        if not self.examples:
            what, fix = f"{self.settings.id!r} has no tasks", "check args: the split or filter may be empty"
            raise self.settings.problem("id", code="environment.no-tasks", what=what, fix=fix)
        notes = [f"{self.settings.id}: {self.rows} tasks ({origin})"]
        duplicates = self.rows - len(self.examples)
        if duplicates:
            notes.append(f"{self.settings.id}: {duplicates} duplicates dropped")
        return LoadedData(examples=tuple(self.examples.values()), notes=tuple(notes))
