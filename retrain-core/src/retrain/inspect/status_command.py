"""`retrain status [DIR]`: the state of every run below a folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from retrain.records.runs.scan import Overview, scan
from retrain.run.streams import can_redraw
from retrain.verdicts.ledger.interim import InterimLooks

Look = Callable[[], Overview]
INTERVAL_S = 5.0
PIPED_WIDTH = 10_000  # do not wrap lines when the output is a file
EPILOG = """\b
Examples:
  retrain status                  all below ./logs
  retrain status runs --active    what is running below ./runs
  retrain status --follow --active --interval 1
  retrain status --follow --json  a line every five seconds

\b
Exit codes: 0 done; 1 there is no such folder; 2 usage error.
"""


@click.command("status", epilog=EPILOG)
@click.argument("root", metavar="[DIR]", default="logs", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="As JSON; with --follow one line each time.")
@click.option("--all", "everything", is_flag=True, help="Also runs that ended and have been idle for 24 hours.")
@click.option("--active", "only_active", is_flag=True, help="Only active runs.")
@click.option("--follow", "--watch", is_flag=True, help="Look again every --interval seconds, until Ctrl-C.")
@click.option(
    "--interval", "interval_s", default=INTERVAL_S, show_default=True, type=click.FloatRange(min=0.05), help="Seconds."
)
def command(root: Path, as_json: bool, everything: bool, only_active: bool, follow: bool, interval_s: float) -> None:
    """Show the runs and campaigns below DIR (default: logs); exit code 1 when there is no such folder."""

    interim = InterimLooks("status", partial(click.echo, err=True))

    def look() -> Overview:
        overview = scan(root).select(everything=everything, only_active=only_active)
        for campaign in overview.campaigns:
            interim.of(campaign)
        if not overview.campaigns:  # the folder may lie inside one
            interim.at([root])
        return overview

    if follow:
        _follow(look, interval_s, as_json=as_json)
    elif as_json:
        click.echo(json.dumps(look().as_data(), indent=2, allow_nan=False))
    else:
        _print(look())


def _print(overview: Overview) -> None:
    from rich.console import Console

    from retrain.inspect.status_show import picture

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    console = Console(highlight=False, width=width)
    console.print(picture(overview, console.width))


def _follow(look: Look, interval_s: float, *, as_json: bool) -> None:
    """Show `look()` repeatedly; Ctrl-C ends it and is not an error."""
    try:
        if can_redraw() and not as_json:
            _follow_live(look, interval_s)
        while True:
            if as_json:
                click.echo(json.dumps(look().as_data(), allow_nan=False))
            else:
                _print(look())
            time.sleep(interval_s)
    except KeyboardInterrupt:
        return


def _follow_live(look: Look, interval_s: float) -> None:
    from rich.console import Console
    from rich.live import Live

    from retrain.inspect.status_show import picture

    first = look()  # report a missing folder before clearing the screen
    console = Console(highlight=False)
    with Live(picture(first, console.width), console=console, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(interval_s)
            live.update(picture(look(), console.width), refresh=True)
