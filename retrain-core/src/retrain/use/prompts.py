"""Prompts from a file, and their tokens: as training renders them, or as they stand."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.build import build_part
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Kind, Tokens
from retrain.run.opened import Opened
from retrain.tasks.columns import column_names, unknown_column, value_at
from retrain.tasks.prompts import encode_prompts
from retrain.text.chat import as_chat
from retrain.text.context import context_length
from retrain.text.terminal_text import printable

FIELDS = ("prompt", "messages", "question", "problem")
TABLES = (".json", ".csv", ".parquet")  # which the source `files` reads
Prompt = str | Sequence[Mapping[str, Any]]


def read_prompts(path: str, config: Config, plugins: Plugins) -> list[Prompt]:
    """Prompts of a file, or of stdin for `-`; ConfigError names a line that holds none.

    Lines of `.jsonl`, or those that begin with `{` where a file has another name, and rows of a table are objects with
    a text or a chat in the column of `prompts_of`. Of any other file every line that is not blank is a prompt.
    """
    if Path(path).suffix.lower() in TABLES:
        return prompts_of([(f"{path} row {n}", row) for n, row in enumerate(_rows(path, config, plugins), 1)], config)
    try:
        with click.open_file(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except (OSError, UnicodeError) as error:
        fix = "give a file of UTF-8 text, or - for stdin"
        raise ConfigError(Problem(where=path, what=f"cannot be read: {error}", fix=fix)) from error
    numbered = [(number, line) for number, line in enumerate(lines, start=1) if line.strip()]
    if not numbered:
        raise ConfigError(Problem(where=path, what="holds no prompt", fix="write one prompt on each line"))
    if Path(path).suffix != ".jsonl" and not numbered[0][1].lstrip().startswith("{"):
        return [line.strip() for _, line in numbered]
    entries = []
    for number, line in numbered:
        where = f"{path}:{number}"
        try:
            entries.append((where, json.loads(line)))
        except (ValueError, RecursionError) as error:
            raise ConfigError(Problem(where=where, what=f"is no JSON: {error}", fix="correct the line")) from None
    return prompts_of(entries, config)


def prompts_of(entries: Iterable[tuple[str, Any]], config: Config) -> list[Prompt]:
    """The prompt of each entry, which comes with its place: a text, a chat, or an object that has one in a column.

    A column that a flag names must exist; else it is the first of the run's columns and of `FIELDS` that an entry has.
    """
    keys = {f"data.{name}": getattr(config.data, name) for name in ("messages_key", "prompt_key")}
    wanted = {path: key for path, key in keys.items() if config.origin(path).layer is Layer.COMMAND_LINE and key}
    known = [key for key in keys.values() if key]
    return [_prompt(entry, where, wanted, (*known, *FIELDS), config.data.messages_key) for where, entry in entries]


def _prompt(row: Any, where: str, wanted: Mapping[str, str], known: Sequence[str], chats: str) -> Prompt:
    """`chats` is the column whose last message may be the answer, as in training."""
    names, entry = [*wanted.values()] or known, row
    if isinstance(row, Mapping):
        for path, key in wanted.items():
            columns = [*column_names(row)]
            if key not in columns:
                named_by = f"--{path.removeprefix('data.').replace('_', '-')}"
                raise ConfigError(unknown_column(key, columns, where=where, named_by=named_by))
        entry = next((value for name in names if (value := value_at(row, name))), None)
    if isinstance(entry, str) and entry:
        return entry
    if messages := as_chat(entry):
        is_training_chat = chats and isinstance(row, Mapping) and value_at(row, chats) is entry
        is_answered = is_training_chat and len(messages) > 1 and messages[-1]["role"] == "assistant"
        return messages[:-1] if is_answered else messages
    fix = f"give a text or messages in one of {', '.join(dict.fromkeys(names))}, or name another with --prompt-key"
    raise ConfigError(Problem(where=where, what="holds no prompt", fix=fix))


def _rows(path: str, config: Config, plugins: Plugins) -> Sequence[Mapping[str, Any]]:
    """The rows of a table, as the source `files` reads them for training."""
    data = config.data.model_copy(update={"source": "files", "path": path, "messages_key": ""})
    origins = {**config.origins, "data.path": Origin(layer=Layer.COMMAND_LINE, place="--prompts")}
    reading = replace(config, tables={**config.tables, "data": data}, origins=origins)
    context = PluginContext(config=reading, seeds=Seeds(0), plugins=plugins)
    source = build_part(Kind.DATA_SOURCE, "files", "--prompts", context, {}, "--prompts")
    rows: Sequence[Mapping[str, Any]] = source.preview(sys.maxsize)
    return rows


def prompt_tokens(
    opened: Opened, prompts: Sequence[Prompt], names: Sequence[str], *, raw: bool = False
) -> list[Tokens]:
    """Token ids of each prompt; ConfigError names one that cannot be read, or leaves no room in the model's context.

    As in training: through the chat template, a plain text with system prompt and instruction of `[data]`. With `raw` a
    text is given to the model as it stands.
    """
    if raw:
        rows = [_raw_tokens(opened, prompt, name) for prompt, name in zip(prompts, names, strict=True)]
    else:
        examples = [Example(id=name, prompt=prompt, reference="") for prompt, name in zip(prompts, names, strict=True)]
        rows = encode_prompts(examples, opened.tokenizer, opened.config)
    limit = context_length(opened.config, opened.plugins)
    for tokens_T, name in zip(rows, names, strict=True):
        if not len(tokens_T) or (limit is not None and len(tokens_T) >= limit):
            what = f"has {len(tokens_T)} tokens" + (f", and the model reads {limit} with its answer" if limit else "")
            raise ConfigError(Problem(where=printable(name), what=what, fix="use another prompt"))
    return rows


def _raw_tokens(opened: Opened, prompt: Prompt, name: str) -> Tokens:
    what, fix = "is a chat, and --raw takes texts", "leave --raw out, or write the text to continue"
    if isinstance(prompt, str):
        try:
            return np.asarray(opened.tokenizer(prompt, verbose=False)["input_ids"], dtype=np.int64)
        except Exception as error:  # each tokenizer library has its own error for half a surrogate pair
            what = f"the tokenizer refuses it: {type(error).__name__}: {printable(str(error))[:300]}"
            fix = "repair the text"
    raise ConfigError(Problem(where=printable(name), what=what, fix=fix))
