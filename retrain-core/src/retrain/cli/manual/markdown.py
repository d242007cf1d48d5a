"""Markdown: building blocks of generated sections, pages that contain such sections, and the topics of the manual.

A generated section sits between two comments that are invisible to readers:

<!-- generated: keys --> ... <!-- end: keys -->

The first word after the colon names a generator in `retrain.cli.manual.command`; the others are its arguments.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from retrain.kernel.errors import ConfigError, Problem


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells may contain any one-line text. Empty columns are left out."""
    kept = [index for index in range(len(header)) if header[index] == "" or any(row[index] for row in rows)]
    header, rows = [header[index] for index in kept], [[row[index] for index in kept] for row in rows]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def value(content: Any) -> str:
    """A default in a TOML-like form for readers; empty for a required value."""
    return (
        ""
        if content is None or content is PydanticUndefined
        else code(json.dumps(content, default=str, ensure_ascii=False))
    )


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: indented blocks become code, lists and tables stay, paragraphs are unwrapped."""
    blocks = []
    for paragraph in inspect.cleandoc(docstring or "").split("\n\n"):
        lines = paragraph.split("\n")
        if "\b" in paragraph or lines[0].startswith(">>> ") or all(line.startswith("    ") for line in lines):
            inner = inspect.cleandoc("\n" + paragraph.replace("\b\n", "").replace("\b", ""))
            blocks.append(f"```text\n{inner}\n```")
        elif lines[0].startswith(("|", "- ", "* ", "1.")):
            blocks.append(paragraph)
        else:
            blocks.append(" ".join(line.strip() for line in lines))
    return "\n\n".join(block for block in blocks if block.strip())


def anchor(text: str) -> str:
    """Text escaped for a heading: the underscores of `retrain_x` are not emphasis."""
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\|", "|").replace("|", "\\|")


MANUAL = Path(__file__).with_name("manual.md")
OTHER_NAMES = {
    "capacity-planning": "capacity",
    "environments": "environment",
    "conditions": "campaign",
    "dataset": "data",
    "your-data": "data",
    "rewards": "reward",
    "evaluation": "eval",
}
_SECTION = re.compile(
    r"^<!-- generated: (?P<what>[^\n>]+?) -->\n(?P<body>.*?)^<!-- end: (?P<end>[^\n>]+?) -->\n",
    re.MULTILINE | re.DOTALL,
)
_MARKER = re.compile(r"^<!-- (?:generated|end): [^\n>]+ -->\n", re.MULTILINE)
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^## (.+)$", re.MULTILINE)

Generate = Callable[[str], str]  # "keys" -> Markdown


@dataclass(frozen=True, slots=True, kw_only=True)
class Topic:
    """A part of the manual: its name on the command line, its heading, and its text from the heading on."""

    name: str
    heading: str
    text: str

    @property
    def summary(self) -> str:
        for paragraph in self.text.split("\n\n")[1:]:
            if not paragraph.startswith(("<!--", "#", "|", "```")):
                return re.split(r"(?<=[.:])\s", " ".join(paragraph.split()), maxsplit=1)[0].rstrip(":.") + "."
        return ""


def regenerated(text: str, generate: Generate) -> str:
    """The page with each section regenerated; everything else stays byte for byte the same.

    ConfigError when a section does not end under its own name.
    """
    num_begun, num_ended = len(re.findall(r"^<!-- generated: ", text, re.MULTILINE)), 0

    def renew(match: re.Match[str]) -> str:
        nonlocal num_ended
        num_ended += 1
        what = match["what"]
        if match["end"] != what:
            raise _damaged(f"section {what!r} ends as {match['end']!r}")
        return f"<!-- generated: {what} -->\n\n{generate(what).strip()}\n\n<!-- end: {what} -->\n"

    page = _SECTION.sub(renew, text)
    if num_ended != num_begun:
        raise _damaged(f"{num_begun} generated sections begin, {num_ended} end")
    return page


def without_markers(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", _MARKER.sub("", text))


def topics(text: str) -> list[Topic]:
    # blank the fenced blocks: a comment in a TOML block is not a heading
    blanked = _FENCE.sub(lambda match: re.sub(r"[^\n]", " ", match[0]), text)
    starts = [*_HEADING.finditer(blanked)]
    ends = [*(match.start() for match in starts[1:]), len(text)]
    return [
        Topic(name=match[1].strip().lower().replace(" ", "-"), heading=match[1].strip(), text=text[match.start() : end])
        for match, end in zip(starts, ends, strict=True)
    ]


def find_topic(text: str, name: str) -> Topic:
    """The topic of the manual that `name` means; ConfigError suggests the nearest one."""
    found = {topic.name: topic for topic in topics(text)}
    wanted = name.strip().lower().replace(" ", "-")
    wanted = OTHER_NAMES.get(wanted, wanted)
    if wanted in found:
        return found[wanted]
    near = get_close_matches(wanted, found, n=1)
    fix = f"did you mean {near[0]!r}?" if near else f"topics: {', '.join(found)}"
    raise ConfigError(
        Problem(code="help.unknown-topic", where="--topic", what=f"the manual has no topic {name!r}", fix=fix)
    )


def _damaged(what: str) -> ConfigError:
    fix = "restore the lines `<!-- generated: NAME -->` and `<!-- end: NAME -->`, or reinstall"
    return ConfigError(Problem(code="help.damaged-page", what=f"damaged page: {what}", fix=fix))
