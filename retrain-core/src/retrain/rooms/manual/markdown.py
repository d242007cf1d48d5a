"""Small pieces of Markdown that the generated sections share."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import PydanticUndefined


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells may hold anything on one line. A column without content is left out."""
    kept = [index for index in range(len(header)) if header[index] == "" or any(row[index] for row in rows)]
    header, rows = [header[index] for index in kept], [[row[index] for index in kept] for row in rows]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def code(text: str) -> str:
    """`text`, or nothing for nothing."""
    return f"`{text}`" if text else ""


def value(content: Any) -> str:
    """A default as TOML would have it, near enough to be read; nothing for what has to be given."""
    return (
        ""
        if content is None or content is PydanticUndefined
        else code(json.dumps(content, default=str, ensure_ascii=False))
    )


def prose(docstring: str | None) -> str:
    """A docstring as Markdown: indented blocks become code, lists and tables stay, paragraphs lose their breaks."""
    blocks = []
    for paragraph in inspect.cleandoc(docstring or "").split("\n\n"):
        lines = paragraph.split("\n")
        if "\b" in paragraph or all(line.startswith("    ") for line in lines):
            inner = inspect.cleandoc("\n" + paragraph.replace("\b\n", "").replace("\b", ""))
            blocks.append(f"```text\n{inner}\n```")
        elif lines[0].startswith(("|", "- ", "* ", "1.")):
            blocks.append(paragraph)
        else:
            blocks.append(" ".join(line.strip() for line in lines))
    return "\n\n".join(block for block in blocks if block.strip())


def anchor(text: str) -> str:
    """Text that Markdown takes literally in a heading: a name such as `retrain_x` is not emphasis."""
    return re.sub(r"([\\`*_\[\]<>])", r"\\\1", text)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("\\|", "|").replace("|", "\\|")
