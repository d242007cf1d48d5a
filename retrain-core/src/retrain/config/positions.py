"""On which line of a TOML text each key stands: `tomllib` reads values but forgets where they were."""

from __future__ import annotations

import re
from collections.abc import Mapping

_HEADER = re.compile(r"^\s*\[\[?\s*([^\]#]+?)\s*\]\]?")
_KEY = re.compile(r"""^\s*((?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+)(?:\s*\.\s*(?:"[^"]*"|'[^']*'|[A-Za-z0-9_-]+))*)\s*=""")
_PART = re.compile(r"""\s*(?:"([^"]*)"|'([^']*)'|([A-Za-z0-9_-]+))\s*""")
_STRING = re.compile(r'"""|\'\'\'|"(?:\\.|[^"\\])*"|\'[^\']*\'|#.*')


def key_lines(text: str) -> Mapping[str, int]:
    """Line (from 1) of every table header and key, by dotted path; the first one counts.

    The text must already be known to parse as TOML. Keys inside inline tables are found under their table's key.
    """
    lines: dict[str, int] = {}
    prefix: tuple[str, ...] = ()
    depth, quote = 0, ""
    for number, line in enumerate(text.splitlines(), start=1):
        if not quote and depth == 0:
            if header := _HEADER.match(line):
                prefix = _parts(header.group(1))
                lines.setdefault(".".join(prefix), number)
                continue
            if match := _KEY.match(line):
                path = (*prefix, *_parts(match.group(1)))
                for end in range(len(prefix) + 1, len(path) + 1):
                    lines.setdefault(".".join(path[:end]), number)
                line = line[match.end() :]
        depth, quote = _after(line, depth, quote)
    return lines


def _parts(dotted: str) -> tuple[str, ...]:
    return tuple(next(g for g in match.groups() if g is not None) for match in _PART.finditer(dotted))


def _after(line: str, depth: int, quote: str) -> tuple[int, str]:
    """Bracket depth and open multi-line quote at the end of a line."""
    if quote:
        end = line.find(quote)
        if end < 0:
            return depth, quote
        line = line[end + 3 :]
    rest = ""
    while line:
        match = _STRING.search(line)
        if match is None:
            rest += line
            break
        rest += line[: match.start()]
        if match.group() in ('"""', "'''"):
            end = line.find(match.group(), match.end())
            if end < 0:
                return depth + _brackets(rest), match.group()
            line = line[end + 3 :]
        else:
            line = line[match.end() :]
    return depth + _brackets(rest), ""


def _brackets(text: str) -> int:
    return sum(text.count(c) for c in "[{") - sum(text.count(c) for c in "]}")
