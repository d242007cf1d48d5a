"""Finds the line of each key in a TOML text: `tomllib` reads values but does not record where they are."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import lru_cache

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


@lru_cache(maxsize=1)  # a campaign reads its file once for each condition
def key_lines(text: str) -> Mapping[str, int]:
    """Line (from 1) of every table header and key, by dotted path; the first occurrence counts.

    The text must already be known to parse as TOML. Keys inside inline tables are found too, keys of tables inside an
    array are not.
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
