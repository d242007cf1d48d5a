"""Markdown building blocks shared by the generated sections."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Sequence
from typing import Any

from pydantic_core import PydanticUndefined


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells may contain any one-line text. Empty columns are left out."""
    kept = [index for index in range(len(header)) if header[index] == "" or any(row[index] for row in rows)]
    header, rows = [header[index] for index in kept], [[row[index] for index in kept] for row in rows]
    lines = [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}"]
    lines += [f"| {' | '.join(_cell(cell) for cell in row)} |" for row in rows]
    return "\n".join(lines)


def code(text: str) -> str:
    """`text` as code; empty for an empty text."""
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
