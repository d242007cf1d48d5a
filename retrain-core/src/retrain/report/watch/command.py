"""`retrain watch RUN`: a page that follows a run, or the runs of a campaign."""

from __future__ import annotations

import threading
import webbrowser
from functools import partial
from pathlib import Path

import click

from retrain.kernel.errors import ConfigError, Problem
from retrain.text.command_options import run_argument

EPILOG = """\b
Examples:
  retrain watch logs/train             print the page's address, and serve it until Ctrl-C
  retrain watch campaigns/first        a page that lists the runs of a campaign, and one for each
  retrain watch logs/train --open      open it in the browser, too
  ssh -L 8123:127.0.0.1:8123 machine   and there: retrain watch logs/train --port 8123

Only this machine can reach the page, only with the whole address, and nothing can be changed with it.

\b
Exit codes: 0 ended by Ctrl-C; 1 the port is taken; 2 usage error, or no run and no campaign there.
"""


@click.command("watch", epilog=EPILOG)
@run_argument()
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port on 127.0.0.1 (default: a free one).")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def command(run: Path, port: int, opens: bool) -> None:
    """Serve a page with the curves and completions of RUN, or of each run of a campaign, to this machine alone."""
    from retrain.records.run import is_run
    from retrain.records.runs.campaign_status import read_campaign
    from retrain.report.watch.server import WatchServer
    from retrain.verdicts.ledger.looks import InterimLooks

    if not is_run(run) and read_campaign(run) is None:
        fix = "name the folder of a run or campaign: `retrain status` lists them"
        raise ConfigError(Problem(where=str(run), what="there is no run here, and no campaign", fix=fix))
    interim = InterimLooks("watch", partial(click.echo, err=True))
    interim.at([run])
    try:
        server = WatchServer(run, port, looked=interim.of)
    except OSError as error:
        raise click.ClickException(f"port {port} cannot be used: {error.strerror or error}") from error
    try:
        with server:
            click.echo(f"{server.url}\nThe page follows {run} until Ctrl-C.")
            if opens:
                webbrowser.open(server.url)
            threading.Event().wait()
    except KeyboardInterrupt:
        click.echo("No longer watched.")
