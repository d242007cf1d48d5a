"""Turns raw tasks into examples: ids come of the content; duplicates and empty references are left out, with a note."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from retrain.api import ConfigError, Example, LoadedData, Message, PluginContext, Problem, Reward
from retrain_rewards.faults import refused

ID_BYTES = 12
# A note reports the memory of tasks that are longer than this together.
LARGE_CHARS = 2**28
# One for all ids: `json.dumps` with `sort_keys` makes an encoder at each call.
ENCODER = json.JSONEncoder(sort_keys=True)


def example_id(source: str, prompt: str | Sequence[Message], reference: str) -> str:
    content = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
    text = ENCODER.encode([source, content, reference])
    return f"{source}-{hashlib.blake2b(text.encode(), digest_size=ID_BYTES).hexdigest()}"


def says_something(content: str | Sequence[Message]) -> bool:
    texts = [content] if isinstance(content, str) else [str(message.get("content") or "") for message in content]
    return any(char.isprintable() and not char.isspace() for text in texts for char in text)


@dataclass(slots=True, kw_only=True)
class Collector:
    """Gathers the tasks of one source, in order.

    Tasks without a prompt or a reference are left out, repeated ones are dropped, and prompts with several references,
    although these cannot all be right, are kept; `finish` notes the number of each. With `has_verifier` the source
    brings a verifier, and None is a valid reference. An empty text, or one of invisible characters, never is, because
    it would make silence correct.
    """

    source: str
    has_verifier: bool = False
    rows: int = 0
    chars: int = 0
    duplicates: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)
    examples: dict[str, Example] = field(default_factory=dict)
    references: dict[str, str] = field(default_factory=dict)  # prompt -> its first reference
    contradicted: dict[str, str] = field(default_factory=dict)  # prompt -> place

    def add(
        self,
        prompt: str | Sequence[Message],
        reference: str | None,
        *,
        place: str,
        absent: str = "empty",
        task: str = "",
        info: Mapping[str, object] | None = None,
    ) -> None:
        """Add one task; for the notes `place` says where it was read, and `absent` why it has no reference."""
        if not says_something(prompt):
            self.skip("no prompt", place=place)
            return
        if not says_something(reference or "") and not (self.has_verifier and reference is None):
            self.skip(f"no reference answer: {absent}", place=place)
            return
        self.rows += 1
        text = (reference or "").strip()
        name = example_id(self.source, prompt, text)
        if name in self.examples:
            self.duplicates += 1
            return
        # A chat cannot be a key; the id of it without a reference can.
        alone = prompt if isinstance(prompt, str) else example_id(self.source, prompt, "")
        if self.references.setdefault(alone, text) != text:
            self.contradicted.setdefault(alone, place)
        self.chars += len(text) + (len(prompt) if isinstance(prompt, str) else len(str(prompt)))
        self.examples[name] = Example(id=name, prompt=prompt, reference=text, task=task, info=info or {})

    def skip(self, reason: str, *, place: str) -> None:
        self.rows += 1
        self.left_out.setdefault(reason, []).append(place)

    def finish(self, *, where: str, read_from: str, reward: Reward | None = None) -> LoadedData:
        notes = [f"{self.source}: {self.rows} rows from {read_from}"]
        notes += [
            f"{self.source}: {len(places)} rows left out: {reason} (first: {places[0]})"
            for reason, places in self.left_out.items()
        ]
        if self.duplicates:
            notes.append(f"{self.source}: {self.duplicates} duplicates dropped")
        if self.contradicted and not self.has_verifier:
            first = next(iter(self.contradicted.values()))
            notes.append(f"{self.source}: {len(self.contradicted)} prompts have several references (first: {first})")
        if self.chars > LARGE_CHARS:
            notes.append(f"{self.source}: the tasks take {self.chars / 2**30:.1f} GB of memory or more")
        if not self.examples:
            what = f"no usable task among {self.rows} rows from {read_from}"
            fix = "give each task a prompt and a reference answer; [data] prompt_key and answer_key name the columns"
            raise refused(where, code="data.no-tasks", what=what, why="; ".join(notes[1:]), fix=fix)
        return LoadedData(examples=tuple(self.examples.values()), notes=tuple(notes), reward=reward)


def refuse_foreign_keys(context: PluginContext, source: str, names: tuple[str, ...]) -> None:
    """ConfigError when a `[data]` key is set that this source does not read, for none may be ignored silently."""
    data = context.config.data
    problems = [
        Problem(
            code="data.unread-key",
            where=context.config.place(f"data.{name}"),
            what=f"is not read by source {source!r}",
            fix="remove it, or use the source that reads it",
        )
        for name in (*names, "messages_key")
        if getattr(data, name) != type(data).model_fields[name].default
    ]
    if problems:
        raise ConfigError(*problems)


def split_text(value: object) -> object:
    return [part.strip() for part in value.split(",")] if isinstance(value, str) else value
