"""Turns raw tasks into examples: content-based ids, no duplicates, no empty references, notes on what was left out."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from retrain.api import ConfigError, Example, LoadedData, Message, Problem, Reward

ID_BYTES = 12


def example_id(source: str, prompt: str | Sequence[Message], reference: str) -> str:
    """`source-<24 hex digits>`: the same for the same source, prompt and reference, on every machine."""
    content = prompt if isinstance(prompt, str) else [dict(message) for message in prompt]
    text = json.dumps([source, content, reference], sort_keys=True)
    return f"{source}-{hashlib.blake2b(text.encode(), digest_size=ID_BYTES).hexdigest()}"


@dataclass(slots=True, kw_only=True)
class Collector:
    """Gathers the tasks of one source in the order they come.

    A task without a prompt or a reference is left out and counted, a repeated one is dropped and counted; `finish`
    puts both into the notes. With `judged` the source brings a verifier that can do without a reference, so that
    None is allowed as one (an empty text still is not: it would make silence correct).
    """

    source: str
    judged: bool = False
    rows: int = 0
    duplicates: int = 0
    left_out: dict[str, list[str]] = field(default_factory=dict)
    examples: dict[str, Example] = field(default_factory=dict)

    def add(
        self,
        prompt: str | Sequence[Message],
        reference: str | None,
        *,
        place: str,
        task: str = "",
        info: Mapping[str, object] | None = None,
    ) -> None:
        """Take one task; `place` says where it stands, for the notes."""
        self.rows += 1
        if not (prompt.strip() if isinstance(prompt, str) else prompt):
            self.left_out.setdefault("no prompt", []).append(place)
            return
        if not (reference or "").strip() and not (self.judged and reference is None):
            self.left_out.setdefault("no reference answer", []).append(place)
            return
        text = (reference or "").strip()
        name = example_id(self.source, prompt, text)
        if name in self.examples:
            self.duplicates += 1
            return
        self.examples[name] = Example(id=name, prompt=prompt, reference=text, task=task, info=info or {})

    def finish(self, *, where: str, read_from: str, reward: Reward | None = None) -> LoadedData:
        """The examples with their notes; ConfigError when none remains."""
        notes = [f"{self.source}: {self.rows} rows from {read_from}"]
        notes += [
            f"{self.source}: {len(places)} rows left out: {reason} (first: {places[0]})"
            for reason, places in self.left_out.items()
        ]
        if self.duplicates:
            notes.append(f"{self.source}: {self.duplicates} duplicates dropped")
        if not self.examples:
            what = f"no usable task among {self.rows} rows" if self.rows else "the data set is empty"
            raise ConfigError(
                Problem(
                    where=where,
                    what=f"{what} ({read_from})",
                    why="; ".join(notes[1:]),
                    fix="a task needs a prompt and a reference answer that is not empty",
                )
            )
        return LoadedData(examples=tuple(self.examples.values()), notes=tuple(notes), reward=reward)
