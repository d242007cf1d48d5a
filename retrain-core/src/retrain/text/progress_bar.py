"""A progress bar on stderr for the long work of a command; a run has its own panel."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import click

from retrain.kernel.contracts.context import PhaseProgress
from retrain.text.phase_progress import progress_data, share_of
from retrain.text.terminal_text import duration, is_redrawable, printable

if TYPE_CHECKING:
    from rich.table import Table

BAR_COLUMNS = 30


@contextmanager
def progress_bar(label: str, progress: PhaseProgress) -> Iterator[None]:
    """Show how far `progress` is and the time left during the block; only a line where stderr cannot be redrawn."""
    if not is_redrawable(sys.stderr):
        click.echo(f"{printable(label)} ...", err=True)
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
    percent = "" if share is None else f"{100 * share:.0f}%  "
    grid.add_row(Text(printable(label), style="bold"), bar, Text(percent + shown, style="cyan"))
    return grid
