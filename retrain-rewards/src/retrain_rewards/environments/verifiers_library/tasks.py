"""Turns an environment's rows into examples."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.api import Example, LoadedData, Message
from retrain_rewards.environments.messages import UnsupportedContentError, plain_data, plain_messages
from retrain_rewards.environments.verifiers_library.settings import Settings

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
        """Add one task, whose id is made of `identity`; ConfigError on content that is not text."""
        self.rows += 1
        try:
            opening: str | list[Message] = prompt if isinstance(prompt, str) else plain_messages(prompt)
        except UnsupportedContentError as error:
            what = f"{self.settings.id!r} has tasks with {error}; only text is supported"
            raise self.settings.problem("id", what, fix="choose an environment of text tasks") from error
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
        """The examples with their notes; ConfigError when there is none."""
        if not self.examples:
            what = f"{self.settings.id!r} has no tasks"
            raise self.settings.problem("id", what, fix="check [environment] args: its split or filter may be empty")
        notes = [f"{self.settings.id}: {self.rows} tasks ({origin})"]
        duplicates = self.rows - len(self.examples)
        if duplicates:
            notes.append(f"{self.settings.id}: {duplicates} duplicates dropped")
        return LoadedData(examples=tuple(self.examples.values()), notes=tuple(notes))
