"""Tables and a progress bar: for a terminal, laid out by rich; tables as plain lines and as Markdown, too."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from retrain.text.amounts import duration, percent
from retrain.text.progress import progress_data, share_of
from retrain.text.terminal_text import is_redrawable, printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from retrain.kernel.contracts.context import PhaseProgress

# Wider than any row: rich wraps at a width, and lines of a file must stay whole.
PIPED_WIDTH = 10_000
BAR_COLUMNS = 30


def table_console() -> Console:
    """A console for tables, whose lines are not wrapped when the output is a file."""
    from rich.console import Console

    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


def rich_table(heads: Sequence[str], rows: Iterable[Sequence[str | Text]] = (), *, num_names: int = 1) -> Table:
    """A table for a terminal; the first `num_names` columns are names and may fold."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
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


@contextmanager
def progress_bar(label: str, progress: PhaseProgress) -> Iterator[None]:
    """Show how far `progress` is and the time left during the block; only a line where stderr cannot be redrawn."""
    if not is_redrawable(sys.stderr):
        print(f"{printable(label)} ...", file=sys.stderr)
        yield
        return
    from rich.console import Console  # only a terminal needs rich
    from rich.live import Live

    since = time.monotonic()
    with Live(
        console=Console(stderr=True),
        get_renderable=lambda: _row(label, progress, since),
        refresh_per_second=4,
        transient=True,
        redirect_stdout=False,  # it may be a file
    ):
        yield


def _row(label: str, progress: PhaseProgress, since: float) -> Table:
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    data = progress_data(progress) if progress.total and progress.started >= since else {}
    share, left_s = share_of(data), data.get("time_left_s")
    shown = f"for {duration(time.monotonic() - since)}" if left_s is None else f"time left: {duration(left_s)}"
    bar = ProgressBar(total=None if share is None else 1.0, completed=share or 0.0, pulse=share is None)
    grid = Table.grid(padding=(0, 1, 0, 0))
    grid.add_column(no_wrap=True, overflow="ellipsis")
    grid.add_column(width=BAR_COLUMNS)
    grid.add_column(no_wrap=True)
    done = "" if share is None else f"{percent(share, 0)}  "
    grid.add_row(Text(printable(label), style="bold"), bar, Text(done + shown, style="cyan"))
    return grid
