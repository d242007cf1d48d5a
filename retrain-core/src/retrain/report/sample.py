"""The parts of a stored completion that a page shows, with long texts shortened."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from retrain.records.reading import number

HEAD_CHARS, TAIL_CHARS = 2400, 1200  # answers are at the end
TOKENS_SHOWN = 6
PARTS_SHOWN = 12


@dataclass(frozen=True, slots=True)
class Excerpt:
    """A text, or its beginning and end and the number of characters left out between them."""

    head: str
    tail: str = ""
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion and its offset in the file; `kind` is best, worst or random. Missing numbers are None."""

    kind: str
    offset: int
    group: str
    index: str
    example_id: str
    prompt: Excerpt
    completion: Excerpt
    reference: Excerpt
    detail: Excerpt
    outcome: str
    stop_reason: str
    reward: float | None
    num_tokens: int | None
    trained: bool
    parts: Mapping[str, float]
    surprisals: tuple[tuple[str, float], ...]


def sample_of(record: Mapping[str, Any], *, kind: str, offset: int) -> Sample:
    """The shown parts of a line of `generations.jsonl`, with tolerance for any content."""
    tokens = number(record.get("num_tokens"))
    return Sample(
        kind=kind,
        offset=offset,
        group=str(record.get("group", "")),
        index=str(record.get("index", "")),
        example_id=str(record.get("example_id", "")),
        prompt=excerpt(record.get("prompt")),
        completion=excerpt(record.get("completion")),
        reference=excerpt(record.get("reference")),
        detail=excerpt(record.get("detail")),
        outcome=str(record.get("outcome", "")),
        stop_reason=str(record.get("stop_reason", "")),
        reward=number(record.get("reward")),
        num_tokens=None if tokens is None else int(tokens),
        trained=record.get("trained") is True,
        parts=_parts(record.get("reward_parts")),
        surprisals=tuple(_surprisals(record.get("top_surprisal_tokens"))),
    )


def excerpt(value: object) -> Excerpt:
    """Excerpt of a text, of messages with their roles, or of the JSON of anything else."""
    whole = _as_text(value)
    left_out = len(whole) - HEAD_CHARS - TAIL_CHARS
    if left_out <= 0:
        return Excerpt(whole)
    return Excerpt(whole[:HEAD_CHARS], whole[-TAIL_CHARS:], left_out)


def _as_text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(each, dict) and "content" in each for each in value):
        return "\n\n".join(f"{each.get('role', '')}: {each['content']}" for each in value)
    return "" if value is None else json.dumps(value, ensure_ascii=False)


def _parts(value: object) -> dict[str, float]:
    found = value.items() if isinstance(value, dict) else ()
    numbers = {str(name): part for name, each in found if (part := number(each)) is not None}
    return dict(list(numbers.items())[:PARTS_SHOWN])


def _surprisals(value: object) -> list[tuple[str, float]]:
    found = value[:TOKENS_SHOWN] if isinstance(value, list) else []
    pairs = [(str(each.get("token", "")), number(each.get("surprisal"))) for each in found if isinstance(each, dict)]
    return [(token, surprisal) for token, surprisal in pairs if surprisal is not None]
