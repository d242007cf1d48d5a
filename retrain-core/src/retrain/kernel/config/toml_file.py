"""TOML: files read within limits of size and shape, the line of each key in them, and values as text."""

from __future__ import annotations

import json
import os
import re
import stat
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from copy import deepcopy
from functools import lru_cache
from io import BufferedReader, TextIOWrapper
from pathlib import Path
from typing import Any

from retrain.kernel.errors import ConfigError, Problem

# Beyond these, tomllib recurses too deeply, takes time quadratic in the parts of a key, or fails on the digits of an
# integer with a plain ValueError.
MAX_CHARS, MAX_DEPTH, MAX_PARTS, MAX_WORD = 1_000_000, 50, 50, 1000
SHOWN_CHARS = 60  # of a faulty line, on each side of the fault
_PLACE = re.compile(r" \(at (?:line (\d+), column (\d+)|end of document)\)$")


def open_regular(file: Path) -> BufferedReader:
    """Open a file for reading; OSError for a folder, and for a pipe or device, where a reader could wait forever."""
    if not stat.S_ISREG(file.stat().st_mode):
        raise OSError("not a regular file, but a folder, pipe, socket or device")
    # O_NONBLOCK, because the file may have become a pipe since `stat`.
    return open(file, "rb", opener=lambda path, flags: os.open(path, flags | os.O_NONBLOCK))


def read_toml(file: Path) -> tuple[dict[str, Any], str]:
    """Tables and text of a TOML file; ConfigError names the fault and its line."""
    try:
        with TextIOWrapper(open_regular(file), encoding="utf-8-sig") as stream:
            text = stream.read(MAX_CHARS + 1)
    except FileNotFoundError:
        fix = "check the path, or write one with `retrain init`"
        missing = Problem(code="config.not-found", where=str(file), what="file not found", fix=fix)
        raise ConfigError(missing) from None
    except (OSError, UnicodeDecodeError) as error:
        what, fix = f"cannot be read: {error}", "give a UTF-8 text file"
        raise ConfigError(Problem(code="config.unreadable", where=str(file), what=what, fix=fix)) from None
    # A copy, because the parsed document stays in the cache.
    return deepcopy(_parsed(text, str(file))), text


def parse_toml(text: str, name: str) -> dict[str, Any]:
    """The tables of a TOML text of moderate size and nesting; ConfigError names `name` and the line otherwise."""
    last = 1
    depth = dots = 0
    if len(text) > MAX_CHARS:
        raise _refused(name, f"has more than {MAX_CHARS:,} characters")
    for kind, token, last in tokens(text):
        # Brackets need not match: this runs before the parser has checked the text.
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
        where, what = f"{name}:{line}", f"not valid TOML: {_PLACE.sub('', str(error))}"
        shown, fix = _excerpt(text.split("\n")[line - 1], column), "correct that line"
        raise ConfigError(Problem(code="config.not-toml", where=where, what=what, why=shown, fix=fix)) from None


# A campaign reads its file once for each condition.
_parsed = lru_cache(maxsize=1)(parse_toml)


def _refused(where: str, what: str) -> ConfigError:
    what, fix = f"{what}: too many for a configuration", "check that this is the file you meant"
    return ConfigError(Problem(code="config.too-large", where=where, what=what, fix=fix))


def _excerpt(line: str, column: int) -> str:
    """The line around a column (from 1), and a caret below it; column 0 marks no place."""
    start = max(0, column - SHOWN_CHARS)
    shown = line[start : start + 2 * SHOWN_CHARS].replace("\t", " ").rstrip()
    return f"{shown}\n    {' ' * (column - 1 - start)}^" if column else shown


# A closing run of quotes may contain one or two that belong to the text. Only \n ends a line in TOML.
_TOKEN = re.compile(
    r'''(?P<comment>\#[^\n]*)
      | (?P<string>"""(?:\\[\s\S]|[^\\])*?(?:"""(?:"{0,2})|\\?\Z) | \'\'\'[\s\S]*?(?:\'\'\'(?:'{0,2})|\Z)
                 | "(?:\\.|[^"\\\n])*"? | '[^'\n]*'?)
      | (?P<bare>[A-Za-z0-9_-]+)
      | (?P<sign>[\[\]{}=,.\n])
      | (?P<other>[\s\S])''',
    re.VERBOSE,
)


# A campaign reads its file once for each condition.
@lru_cache(maxsize=1)
def key_lines(text: str) -> Mapping[str, int]:
    """Line (from 1) of every table header and key, by dotted path; the first occurrence counts.

    The text must already be known to parse as TOML. Keys of inline tables are found too, unless inside an array.
    """
    lines: dict[str, int] = {}
    table: tuple[str, ...] = ()
    parts: list[tuple[str, int]] = []  # of the key that is being read, with their lines
    enclosing: list[tuple[str, tuple[str, ...]]] = []  # opening brackets of values, with the path of the value
    is_key = True
    for kind, token, line in tokens(text):
        if kind in ("bare", "string"):
            parts += [(token, line)] if is_key else []
        elif token == "=" or (token == "]" and parts and not enclosing):  # the end of a key, or of a table's header
            base = enclosing[-1][1] if enclosing else table if token == "=" else ()
            path = (*base, *(_name(part) for part, _ in parts))
            if all(bracket == "{" for bracket, _ in enclosing):
                for end in range(len(base) + 1, len(path) + 1):
                    lines.setdefault(".".join(path[:end]), parts[0][1])
            table, is_key, parts = (table, False, []) if token == "=" else (path, True, [])
        elif token in ("[", "{") and not is_key:
            enclosing.append((token, path))
            is_key = token == "{"
        elif token in ("]", "}") and enclosing:
            enclosing.pop()
            is_key = False
        elif token in (",", "\n"):
            is_key = not enclosing or enclosing[-1][0] == "{"
    return lines


def tokens(text: str) -> Iterator[tuple[str, str, int]]:
    """Kind, text and line of each token of any text, TOML or not; one that is never closed reaches to its end."""
    line = 1
    for match in _TOKEN.finditer(text):
        kind, content = str(match.lastgroup), match.group()
        if kind != "comment" and not (kind == "other" and content.isspace()):
            yield kind, content, line
        line += content.count("\n")


def _name(part: str) -> str:
    return str(tomllib.loads(f"text = {part}")["text"]) if part[0] in "\"'" else part


def toml_text(value: Any) -> str:
    """A value as TOML: `true`, `"grpo"`, `[1, 2]`, `{ scale = "std" }`; None becomes `(unset)`."""
    if value is None:
        return "(unset)"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {toml_text(one)}" for name, one in value.items()) + " }" if value else "{}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_text, value)) + "]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def unquoted(value: Any, default: Any) -> str:
    """Return as TOML the number or boolean that was put in quotes where `default` is one; empty for any other value."""
    if not isinstance(value, str) or not isinstance(default, int | float):
        return ""
    try:
        meant = tomllib.loads(f"value = {value}")["value"]
    # Also raised for thousands of digits and for thousands of brackets.
    except (ValueError, RecursionError):
        return ""
    is_kind = isinstance(meant, bool) == isinstance(default, bool) and isinstance(meant, int | float)
    return value.strip() if is_kind else ""


def parse_free(text: str) -> Any:
    """A value for a free table: JSON if the text parses as JSON (number, true, list, object), otherwise the text."""
    lowered = text.strip().lower()
    # `json.loads` would make numbers of NaN and Infinity, but no record may hold them.
    if lowered in ("nan", "inf", "-inf", "infinity", "-infinity"):
        return text
    # Also raised for thousands of digits and for thousands of brackets.
    with suppress(ValueError, RecursionError):
        return json.loads(lowered if lowered in ("true", "false") else text)
    try:
        # `.5` and `1.` are numbers to a person, but not to JSON.
        return float(text) if any(c in text for c in ".eE") else text
    except ValueError:
        return text
