"""Takes prompt and answer out of a row, and refuses values that cannot be one."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from decimal import Decimal
from itertools import chain
from typing import Any, Literal

from retrain.api import ConfigError, Message, Problem, column_names, unknown_column
from retrain_rewards.sources.rows import Row

Extract = Literal["whole", "boxed", "hashes"]
ROLES = ("system", "user", "assistant", "tool")


def require_columns(rows: Iterable[Row], columns: Mapping[str, str], *, file: str) -> Iterator[Row]:
    """The same rows; ConfigError when a column is in none of them.

    `columns` maps a column to the key in the configuration that names it. A file without rows passes.
    """
    seen: dict[str, None] = {}
    held: list[Row] = []
    rows = iter(rows)
    for row in rows:
        held.append(row)
        seen.update(dict.fromkeys(column_names(row.values)))
        if seen.keys() >= columns.keys():
            break
    problems = [
        unknown_column(column, seen, where=file, named_by=key) for column, key in columns.items() if column not in seen
    ]
    if held and problems:
        raise ConfigError(*problems)
    return chain(held, rows)


def column_of(key: str, columns: Collection[str]) -> str:
    """The column that a key reads: itself, or the first part of `reward_model.ground_truth`; empty for none."""
    head = key.partition(".")[0]
    return key if key in columns else head if head in columns else ""


def reference_text(value: Any, place: str, *, holds_tests: bool = False) -> str:
    """A reference answer as text: a text as it is, a number as it is written, None as the empty text.

    With `holds_tests` it may be a list or an object too, which becomes JSON.
    """
    if holds_tests and isinstance(value, list | dict):
        return _encodable(json.dumps(value, default=str), place)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return _encodable(value, place)
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not math.isfinite(value):
        what = f"a reference answer must be text or a number, not {type(value).__name__} {value!r:.60}"
        raise ConfigError(Problem(where=place, what=what, fix="write it as text"))
    return str(value)


def absence(value: Any, how: Extract = "whole") -> str:
    """What a value is, or lacks, that gives no reference answer: for the note on rows that are left out."""
    if value is None:
        return "null"
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if not str(value).strip() or how == "whole":
        return "empty"
    return "no box in the solution" if how == "boxed" else "no #### in the solution"


def prompt_of(value: Any, place: str) -> str | tuple[Message, ...]:
    """A text, or a chat `[{"role": ..., "content": ...}, ...]` that ends before the answer; None is an empty text."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _encodable(value, place)
    if not isinstance(value, list):
        what = f"a prompt must be text or a list of chat messages, not {type(value).__name__}"
        raise ConfigError(Problem(where=place, what=what, fix="write it as text"))
    messages = tuple(_message(message, place) for message in value)
    if messages and messages[-1]["role"] not in ("user", "tool"):
        what = f"the chat ends with a message of the {messages[-1]['role']}"
        raise ConfigError(Problem(where=place, what=what, fix="end it with the user's message"))
    return messages


def _message(message: Any, place: str) -> Message:
    fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    if not {"role", "content"} <= fields.keys() or not all(isinstance(v, str) for v in fields.values()):
        what = "a chat message must be an object of texts with role and content"
        raise ConfigError(Problem(where=place, what=what, fix='write {"role": "user", "content": "..."}'))
    if fields["role"] not in ROLES:
        fix = f"use one of: {', '.join(ROLES)}"
        raise ConfigError(Problem(where=place, what=f"unknown role {fields['role']!r}", fix=fix))
    return {name: _encodable(text, place) for name, text in fields.items()}


def plain(values: Mapping[str, Any]) -> dict[str, object]:
    """Other columns as plain data (JSON); values that JSON does not have become text."""
    return dict(json.loads(json.dumps(values, default=str)))


def _encodable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        what = "the text holds half a surrogate pair, which no tokenizer can read"
        raise ConfigError(Problem(where=place, what=what, fix="repair the escape sequence")) from None
    return text
