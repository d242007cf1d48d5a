"""Prompts from a file, and their tokens: as training renders them, or as they stand."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Example, Tokens
from retrain.rooms.session.opened import Opened
from retrain.rooms.tasks.prompts import encode_prompts
from retrain.rooms.text.chat import as_chat
from retrain.rooms.text.context import context_length
from retrain.rooms.text.terminal_text import printable

FIELDS = ("prompt", "messages", "question", "problem")
Prompt = str | Sequence[Mapping[str, Any]]


def read_prompts(path: str) -> list[Prompt]:
    """Prompts of a file, or of stdin for `-`; ConfigError names a line that holds none.

    Lines of `.jsonl`, or those that begin with `{` where a file has another name, are objects with one of `FIELDS`: a
    text, or a chat of messages. Of any other file every line that is not blank is a prompt.
    """
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
    return [_of_line(line, f"{path}:{number}") for number, line in numbered]


def _of_line(line: str, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(Problem(where=where, what=f"is no JSON: {error}", fix="correct the line")) from None
    if isinstance(entry, dict):
        entry = next((entry[name] for name in FIELDS if entry.get(name)), None)
    if isinstance(entry, str) and entry:
        return entry
    if messages := as_chat(entry):
        return messages
    fix = f"give an object with one of {', '.join(FIELDS)}: a text, or a list of messages"
    raise ConfigError(Problem(where=where, what="holds no prompt", fix=fix))


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
    if not isinstance(prompt, str):
        what, fix = (
            "is a chat, and --raw takes texts",
            "leave --raw out, or write the text that the model is to go on with",
        )
        raise ConfigError(Problem(where=printable(name), what=what, fix=fix))
    try:
        return np.asarray(opened.tokenizer(prompt, verbose=False)["input_ids"], dtype=np.int64)
    except Exception as error:  # each tokenizer library has an error of its own for half a surrogate pair
        what = f"the tokenizer refuses it: {type(error).__name__}: {printable(str(error))[:300]}"
        raise ConfigError(Problem(where=printable(name), what=what, fix="repair the text")) from error
