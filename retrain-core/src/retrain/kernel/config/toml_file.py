"""Reads TOML files within limits of size and shape; an error shows the line that is wrong."""

from __future__ import annotations

import os
import re
import stat
import tomllib
from copy import deepcopy
from functools import lru_cache
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any

from retrain.kernel.config.positions import tokens
from retrain.kernel.errors import ConfigError, Problem

MAX_CHARS, MAX_DEPTH, MAX_PARTS, MAX_WORD = 1_000_000, 50, 50, 1000
SHOWN_CHARS = 60  # of a faulty line, on each side of the fault
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def open_regular(file: Path) -> BufferedReader:
    """Open a file for reading; OSError for a pipe, socket or device, where a reader could wait forever."""
    mode = file.stat().st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):  # a directory gets the system's own error
        raise OSError("not a regular file, but a pipe, socket or device")
    return open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def read_toml(file: Path) -> tuple[dict[str, Any], str]:
    """Tables and text of a TOML file; ConfigError says what is wrong, with its line."""
    try:
        with TextIOWrapper(open_regular(file), encoding="utf-8-sig") as stream:
            text = stream.read(MAX_CHARS + 1)
    except FileNotFoundError:
        fix = "check the path, or write one with `retrain init`"
        raise ConfigError(Problem(where=str(file), what="file not found", fix=fix)) from None
    except (OSError, UnicodeDecodeError) as error:
        fix = "give a UTF-8 text file"
        raise ConfigError(Problem(where=str(file), what=f"cannot be read: {error}", fix=fix)) from None
    return deepcopy(_parsed(text, str(file))), text


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The tables of a TOML text of moderate size and nesting; ConfigError names `name` and the line otherwise."""
    last = 1
    depth = dots = 0
    if len(text) > MAX_CHARS:
        raise _refused(name, f"has more than {MAX_CHARS:,} characters")
    for kind, token, last in tokens(text):
        depth = max(0, depth + (token in ("[", "{")) - (token in ("]", "}"))) if kind == "sign" else depth
        dots = dots + 1 if token == "." else dots if kind in ("bare", "string") else 0
        if depth > MAX_DEPTH or dots >= MAX_PARTS:
            raise _refused(f"{name}:{last}", f"has more than {MAX_DEPTH} levels of nesting")
        if kind == "bare" and len(token) > MAX_WORD:
            raise _refused(f"{name}:{last}", f"has a number or name of {len(token)} characters")
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = _PLACE.search(str(error))
        line, column = (int(place[1]), int(place[2])) if place and place[1] else (last, 0)
        what = f"not valid TOML: {_PLACE.sub('', str(error))}"
        shown = _excerpt(text.split("\n")[line - 1], column)
        raise ConfigError(Problem(where=f"{name}:{line}", what=what, why=shown, fix="correct that line")) from None


_parsed = lru_cache(maxsize=1)(parse_toml)  # a campaign reads its file once for each condition


def _refused(where: str, what: str) -> ConfigError:
    return ConfigError(
        Problem(where=where, what=f"{what}, which no configuration needs", fix="check that this is the file you meant")
    )


def _excerpt(line: str, column: int) -> str:
    """The line around a column (from 1), and a caret below it; column 0 marks no place."""
    start = max(0, column - SHOWN_CHARS)
    shown = line[start : start + 2 * SHOWN_CHARS].replace("\t", " ").rstrip()
    return f"{shown}\n    {' ' * (column - 1 - start)}^" if column else shown
