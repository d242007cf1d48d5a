"""Turns rows of prompts and answers into tasks, for every source that reads a table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from decimal import Decimal
from itertools import chain, islice
from typing import Any, ClassVar, Literal, cast

from retrain.api import (
    ConfigError,
    LoadedData,
    Message,
    PluginContext,
    Reward,
    Table,
    column_names,
    key,
    unknown_column,
    value_at,
)
from retrain_rewards.boxed import last_boxed
from retrain_rewards.faults import refused
from retrain_rewards.sources.collector import Collector
from retrain_rewards.sources.rows import Row
from retrain_rewards.tables import RewardTable, reward_names

HASHES = "####"
ROLES = ("system", "user", "assistant", "tool")
# GSM8K writes 1,250; a run compares with 1250.
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3})", re.ASCII)

Extract = Literal["whole", "boxed", "hashes"]
Prompt = str | tuple[Message, ...]


class TableOptions(Table):
    """`[data.options]` of every source that reads a table."""

    subset: str = key("", "Configuration of a data set, or sub-folder of a local copy.")
    split: str = key("", "Split: train, test, validation, ...")
    where: dict[str, Any] = key({}, 'Rows to keep, by column: {level = "Level 5"}, {level = [4, 5]}.')
    extract: Extract = key("whole", "Reference: the whole answer, its last box, or the text after its last ####.")
    answer_in_chat: bool = key(False, "The chat in prompt_key ends with the answer, an assistant's message.")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The prompt of one row, its reference (None: the source's own verifier needs none), and their columns."""

    prompt: Prompt
    reference: str | None
    used: frozenset[str]
    absent: str = "empty"  # the reason for a missing reference


class TableSource:
    """One task per row. A subclass says where rows come from (`parts`), and may read them in its own way (`task`).

    `prompt_key` and `answer_key` replace the defaults of the keys of `[data]`. Both may name a field inside a column,
    `reward_model.ground_truth`.
    """

    name: ClassVar[str]
    prompt_key: ClassVar[str] = "prompt"
    answer_key: ClassVar[str] = "answer"
    extract: ClassVar[Extract] = "whole"
    reward: ClassVar[Reward | None] = None

    def __init__(self, context: PluginContext) -> None:
        data, self.place = context.config.data, context.config.place
        self.options = cast("Any", context.params)  # a TableOptions
        self.path = data.path
        fields, names = type(data).model_fields, ("prompt_key", "answer_key")
        self.is_default = {name for name in names if getattr(data, name) == fields[name].default}
        self.keys = {name: getattr(self if name in self.is_default else data, name) for name in names}
        self.messages = data.messages_key
        if self.messages:
            if "prompt_key" not in self.is_default:
                what = f"the prompt is both {self.messages!r} and {self.keys['prompt_key']!r}"
                fix = "leave prompt_key or messages_key out"
                raise refused(self.place("data.messages_key"), code="data.two-prompts", what=what, fix=fix)
            self.keys["prompt_key"] = self.messages
        tests = context.config.table("reward", RewardTable).tests if "code" in reward_names(context.config) else ""
        self.holds_tests = self.keys["answer_key"] == tests
        is_given = "extract" in self.options.model_fields_set
        self.how: Extract = self.options.extract if is_given else self.extract

    def parts(self) -> Iterator[tuple[str, Iterator[Row]]]:
        """Yield the rows of every file, with its name, in a fixed order; ConfigError when they cannot be read."""
        raise NotImplementedError

    def read_from(self) -> str:
        raise NotImplementedError

    def where(self) -> str:
        return self.place("data.path" if self.path else "data.source")

    def columns(self) -> dict[str, str]:
        """Return the columns that every file must have, each with the key of the configuration that names it."""
        in_chat = self.options.answer_in_chat or (self.messages and "answer_key" in self.is_default)
        used = ["prompt_key"] if in_chat else [*self.keys]
        named = {self.keys[name]: self.place(f"data.{name}") for name in used}
        if self.messages:
            named[self.messages] = self.place("data.messages_key")
        return named | dict.fromkeys(self.options.where, self.place("data.options"))

    def preview(self, count: int) -> list[Mapping[str, Any]]:
        return [row.values for row in islice((row for _, rows in self.parts() for row in rows), count)]

    def load(self) -> LoadedData:
        if self.keys["prompt_key"] == self.keys["answer_key"] and not self.options.answer_in_chat:
            what = f"{self.keys['answer_key']!r} is also the column of the prompt"
            fix = "name the column that holds the answer, or set options = { answer_in_chat = true } for whole chats"
            raise refused(self.place("data.answer_key"), code="data.same-column", what=what, fix=fix)
        collector = Collector(source=self.name, has_verifier=self.reward is not None)
        chosen = {
            column: {str(each) for each in (value if isinstance(value, list) else [value])}
            for column, value in self.options.where.items()
        }
        for row in self._complete_rows():
            if any(str(value_at(row.values, column)) not in values for column, values in chosen.items()):
                collector.skip("not chosen by [data.options] where", place=row.place)
                continue
            task = self.task(row)
            others = {name: value for name, value in row.values.items() if name not in task.used}
            # Values that JSON does not have, such as dates, become text.
            info = json.loads(json.dumps(others, default=str))
            collector.add(task.prompt, task.reference, place=row.place, absent=task.absent, task=self.name, info=info)
        return collector.finish(where=self.where(), read_from=self.read_from(), reward=self.reward)

    def task(self, row: Row) -> Task:
        prompt_key, answer_key = self.keys["prompt_key"], self.keys["answer_key"]
        value, answer = value_at(row.values, prompt_key), value_at(row.values, answer_key)
        used = {column_of(prompt_key, row.values)}
        if self.options.answer_in_chat:
            value, answer = without_answer(value, row.place)
        elif self.messages and ends_with_answer(value):
            value, last = without_answer(value, row.place)
            answer = last if answer is None else answer
        # A worked solution stays in `info`, for a warm start on it.
        elif self.how == "whole":
            used.add(column_of(answer_key, row.values))
        return Task(
            prompt=prompt_of(value, row.place),
            reference=extracted(reference_text(answer, row.place, holds_tests=self.holds_tests), self.how),
            used=frozenset(used),
            absent=absence(answer, self.how),
        )

    def _complete_rows(self) -> Iterator[Row]:
        columns, complete = self.columns(), ""
        for file, rows in self.parts():
            try:
                checked = require_columns(rows, columns, file=file)
            except ConfigError as error:
                if not complete:
                    raise
                what = f"has other columns than {complete} of the same data"
                fix = 'give both the same columns, or name the files of one kind: path = "FOLDER/*.jsonl"'
                mixed = refused(file, code="data.mixed-columns", what=what, fix=fix)
                raise ConfigError(*mixed.problems, *error.problems) from None
            yield from checked
            complete = complete or file


def extracted(answer: str, how: Extract) -> str:
    if how == "boxed":
        return last_boxed(answer) or ""
    if how == "hashes":
        return _THOUSANDS.sub("", answer.rpartition(HASHES)[2].strip()) if HASHES in answer else ""
    return answer


def ends_with_answer(chat: Any) -> bool:
    last = chat[-1] if isinstance(chat, list) and chat else None
    return isinstance(last, Mapping) and last.get("role") == "assistant"


def without_answer(chat: Any, place: str) -> tuple[Any, Any]:
    if not ends_with_answer(chat):
        what = "the chat does not end with a message of the assistant"
        fix = "leave answer_in_chat out, and name the column of the answer in [data] answer_key"
        raise refused(place, code="data.chat-without-answer", what=what, fix=fix)
    return chat[:-1], chat[-1].get("content")


def require_columns(rows: Iterable[Row], columns: Mapping[str, str], *, file: str) -> Iterator[Row]:
    """Return the same rows; ConfigError when a column is in none of them, with the key that names it."""
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
    head = key.partition(".")[0]
    return key if key in columns else head if head in columns else ""


def reference_text(value: Any, place: str, *, holds_tests: bool = False) -> str:
    """Return a reference as text: a number as written, None as "", tests as JSON with `holds_tests`."""
    if holds_tests and isinstance(value, list | dict):
        return _encodable(json.dumps(value, default=str), place)
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return _encodable(value, place)
    # True is an int in Python, and "True" is no reference anyone meant.
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal) or not math.isfinite(value):
        what = f"a reference answer must be text or a number, not {type(value).__name__} {value!r:.60}"
        raise refused(place, code="data.bad-reference", what=what, fix="write it as text")
    return str(value)


def absence(value: Any, how: Extract = "whole") -> str:
    if value is None:
        return "null"
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if not str(value).strip() or how == "whole":
        return "empty"
    return "no box in the solution" if how == "boxed" else "no #### in the solution"


def prompt_of(value: Any, place: str) -> str | tuple[Message, ...]:
    """Return a text, or a chat `[{"role": ..., "content": ...}, ...]` that ends before the answer; None is ""."""
    if value is None:
        return ""
    if isinstance(value, str):
        return _encodable(value, place)
    if not isinstance(value, list):
        what = f"a prompt must be text or a list of chat messages, not {type(value).__name__}"
        raise refused(place, code="data.bad-prompt", what=what, fix="write it as text")
    messages = tuple(_message(message, place) for message in value)
    if messages and messages[-1]["role"] not in ("user", "tool"):
        what = f"the chat ends with a message of the {messages[-1]['role']}"
        raise refused(place, code="data.chat-last-role", what=what, fix="end it with the user's message")
    return messages


def _message(message: Any, place: str) -> Message:
    fields = {k: v for k, v in message.items() if v is not None} if isinstance(message, dict) else {}
    if not {"role", "content"} <= fields.keys() or not all(isinstance(v, str) for v in fields.values()):
        what = "a chat message must be an object of texts with role and content"
        raise refused(place, code="data.bad-message", what=what, fix='write {"role": "user", "content": "..."}')
    if fields["role"] not in ROLES:
        fix = f"use one of: {', '.join(ROLES)}"
        raise refused(place, code="data.unknown-role", what=f"unknown role {fields['role']!r}", fix=fix)
    return {name: _encodable(text, place) for name, text in fields.items()}


def _encodable(text: str, place: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        what = "the text holds half a surrogate pair, and no tokenizer can read it"
        raise refused(place, code="data.bad-text", what=what, fix="repair the escape sequence") from None
    return text
