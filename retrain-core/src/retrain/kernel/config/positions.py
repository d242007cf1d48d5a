"""Finds the line of each key in a TOML text: `tomllib` reads values but does not record where they are."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

# A closing run of quotes may contain one or two that belong to the text. Only \n ends a line in TOML.
_TOKEN = re.compile(
    r'''(?P<comment>\#[^\n]*)
      | (?P<string>"""(?:\\[\s\S]|[^\\])*?"""(?:"{0,2}) | \'\'\'[\s\S]*?\'\'\'(?:'{0,2})
                 | "(?:\\.|[^"\\\n])*" | '[^'\n]*')
      | (?P<bare>[A-Za-z0-9_-]+)
      | (?P<sign>[\[\]{}=,.\n])
      | (?P<other>[\s\S])''',
    re.VERBOSE,
)
_END = ("end", "", 0)


def key_lines(text: str) -> Mapping[str, int]:
    """Line (from 1) of every table header and key, by dotted path; the first occurrence counts.

    The text must already be known to parse as TOML. Keys inside inline tables are found too, keys of tables inside an
    array are not.
    """
    scan = _Scan(_tokens(text))
    prefix: tuple[str, ...] = ()
    while scan.kind != "end":
        if scan.text == "[":
            prefix = scan.header()
        elif scan.text == "\n":
            scan.advance()
        else:
            scan.pair(prefix)
    return scan.lines


def _tokens(text: str) -> list[tuple[str, str, int]]:
    found, line = [], 1
    for match in _TOKEN.finditer(text):
        kind, content = str(match.lastgroup), match.group()
        if kind != "comment" and not (kind == "other" and content.isspace()):
            found.append((kind, content, line))
        line += content.count("\n")
    return found


@dataclass(slots=True)
class _Scan:
    """A walk over the tokens of a valid document."""

    tokens: list[tuple[str, str, int]]
    position: int = 0
    lines: dict[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> str:
        return self._token[0]

    @property
    def text(self) -> str:
        return self._token[1]

    @property
    def _token(self) -> tuple[str, str, int]:
        return self.tokens[self.position] if self.position < len(self.tokens) else _END

    def advance(self) -> None:
        self.position += 1

    def header(self) -> tuple[str, ...]:
        """`[a.b]` or `[[a.b]]`."""
        line = self._token[2]
        path = self._key()
        while self.text == "]":
            self.advance()
        self._note(path, 0, line)
        return path

    def pair(self, prefix: tuple[str, ...], *, recorded: bool = True) -> None:
        """`a.b = value`."""
        line = self._token[2]
        path = (*prefix, *self._key())
        self.advance()  # the equals sign
        if recorded:
            self._note(path, len(prefix), line)
        self._value(path, recorded)

    def _value(self, path: tuple[str, ...], recorded: bool) -> None:
        opening = self.text
        if opening not in ("[", "{"):
            while self.kind != "end" and (self.kind == "string" or self.text not in (",", "]", "}", "\n")):
                self.advance()
            return
        self.advance()
        while self.kind != "end" and (self.kind == "string" or self.text not in ("]", "}")):
            if self.text in (",", "\n") and self.kind == "sign":
                self.advance()
            elif opening == "{":
                self.pair(path, recorded=recorded)
            else:
                self._value(path, recorded=False)
        self.advance()

    def _key(self) -> tuple[str, ...]:
        parts: list[str] = []
        while self.kind != "end" and not (self.kind == "sign" and self.text in ("=", "]")):
            if self.kind == "bare":
                parts.append(self.text)
            elif self.kind == "string":
                parts.append(str(tomllib.loads(f"text = {self.text}")["text"]))
            self.advance()
        return tuple(parts)

    def _note(self, path: tuple[str, ...], start: int, line: int) -> None:
        for end in range(start + 1, len(path) + 1):
            self.lines.setdefault(".".join(path[:end]), line)
