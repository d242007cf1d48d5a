"""One way to lay out a table: names to the left, numbers to the right; for a terminal, as plain lines, as Markdown."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from retrain.text.terminal_text import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


PIPED_WIDTH = 10_000


def table_console() -> Console:
    """A console for tables, whose lines are not wrapped when the output is a file."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def rich_table(
    heads: Sequence[str], rows: Iterable[Sequence[str | Text]] = (), *, num_names: int = 1, is_bare: bool = False
) -> Table:
    """A table for a terminal; the first `num_names` columns are names and may fold. Bare, it shows no heads."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold", show_header=not is_bare)
    for index, head in enumerate(heads):
        if index < num_names:
            table.add_column(head, overflow="fold")
        else:
            table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in row))
    return table


def table_lines(heads: Sequence[str], rows: Iterable[Sequence[str]], *, num_names: int = 1) -> list[str]:
    """Aligned lines of text, two spaces between columns."""
    table = [heads, *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if index < num_names else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, num_names: int = 1) -> list[str]:
    """Lines of a Markdown table; the cells are Markdown."""
    bars = ["---" if index < num_names else "---:" for index in range(len(heads))]
    return [f"| {' | '.join(row)} |" for row in (heads, bars, *rows)]


def escaped(text: str) -> str:
    """Text escaped for Markdown: control characters, markup and the bar of a table."""
    plain = printable(text)
    for character in "\\`*_[]<>|~#":
        plain = plain.replace(character, f"\\{character}")
    return plain.replace("&", "&amp;")
