"""`retrain status [DIR | RUN]`: the state of every run below a folder; of one run its resume and its forecast."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import click

from retrain.kernel.errors import EXIT_DONE, EXIT_FAILED
from retrain.kernel.registry import Plugins
from retrain.records.runs.scan import Overview, scan
from retrain.text.command_options import json_option
from retrain.text.process import can_redraw
from retrain.text.terminal_text import printable
from retrain.verdicts.ledger.interim import InterimLooks

Look = Callable[[], Overview]
FOLDER = Path("logs")
INTERVAL_S = 5.0
LEVEL = 0.8  # of a forecast's interval
PIPED_WIDTH = 10_000  # do not wrap lines when the output is a file
EPILOG = """\b
Examples:
  retrain status                  all below ./logs
  retrain status runs --active    what is running below ./runs
  retrain status --follow --active --interval 1
  retrain status --follow --json  a line every five seconds
  retrain status logs/train --resume
  retrain status logs/train --resume --config longer.toml --json
  retrain status logs/campaign_20260301_120000/runs/maxrl+none_s7 --forecast --among logs

\b
Exit codes: 0 done; 1 there is no such folder, or the run of --resume cannot continue; 2 usage or configuration error,
            or there are too few finished runs for --forecast, or forecasts are withdrawn.
"""


@click.command("status", epilog=EPILOG)
@click.argument("root", metavar="[DIR | RUN]", required=False, type=click.Path(path_type=Path))
@json_option("As JSON; with --follow one line each time.")
@click.option("--all", "everything", is_flag=True, help="Also runs that ended and have been idle for 24 hours.")
@click.option("--active", "only_active", is_flag=True, help="Only active runs.")
@click.option("--follow", "--watch", is_flag=True, help="Look again every --interval seconds, until Ctrl-C.")
@click.option(
    "--interval", "interval_s", default=INTERVAL_S, show_default=True, type=click.FloatRange(min=0.05), help="Seconds."
)
@click.option("--resume", is_flag=True, help="Of RUN: what `retrain --resume RUN` would restore and what not.")
@click.option(
    "--config",
    "config_file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help="With --resume: configuration to continue with.",
)
@click.option("--forecast", is_flag=True, help="Of RUN: its last held-out rate, forecast from finished runs.")
@click.option(
    "--among",
    type=click.Path(path_type=Path),
    help="With --forecast: folder with finished runs (default: the one that holds RUN).",
)
@click.option("--level", type=click.FloatRange(0.5, 0.99), help="With --forecast: of the interval (default: 0.8).")
@click.pass_context
def command(
    ctx: click.Context,
    root: Path | None,
    as_json: bool,
    everything: bool,
    only_active: bool,
    follow: bool,
    interval_s: float,
    resume: bool,
    config_file: Path | None,
    forecast: bool,
    among: Path | None,
    level: float | None,
) -> None:
    """Show the runs and campaigns below DIR (default: logs); exit code 1 when there is no such folder.

    With --resume say what a resume of RUN would restore and what not, without loading a model; exit code 1 if it could
    not continue. With --forecast forecast the last held-out rate of RUN.
    """
    if resume or forecast:
        if (resume and forecast) or everything or only_active or follow:
            raise click.UsageError("--resume and --forecast exclude each other, --all, --active and --follow")
        if root is None:
            raise click.UsageError("--resume and --forecast need a RUN")
    if config_file and not resume:
        raise click.UsageError("--config goes with --resume")
    if not forecast and (among or level is not None):
        raise click.UsageError("--among and --level go with --forecast")
    if resume and root:
        ctx.exit(_print_resume(root.expanduser(), config_file, ctx.obj, as_json=as_json))
    if forecast and root:
        from retrain.verdicts.forecast.run_forecast import print_forecast  # imports numpy, that `status` does not need

        print_forecast(root, among, level or LEVEL, as_json=as_json)
        return
    folder, interim = root or FOLDER, InterimLooks("status", partial(click.echo, err=True))

    def look() -> Overview:
        overview = scan(folder).select(everything=everything, only_active=only_active)
        for campaign in overview.campaigns:
            interim.of(campaign)
        if not overview.campaigns:  # the folder may lie inside one
            interim.at([folder])
        return overview

    if follow:
        _follow(look, interval_s, as_json=as_json)
    elif as_json:
        click.echo(json.dumps(look().as_data(), indent=2, allow_nan=False))
    else:
        _print(look())


def _print_resume(run: Path, config_file: Path | None, plugins: Plugins, *, as_json: bool) -> int:
    """Print what a resume would restore; returns the exit code."""
    from retrain.inspect.resume_check import check_lines, check_resume  # imports the training loop

    check = check_resume(run, config_file, plugins)
    if as_json:
        click.echo(json.dumps(check.as_data(), indent=2, allow_nan=False))
    else:
        click.echo("\n".join(map(printable, check_lines(check))))
    return EXIT_DONE if check.can_resume else EXIT_FAILED


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
