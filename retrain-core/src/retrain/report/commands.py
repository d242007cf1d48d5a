"""`retrain report CAMPAIGN | RUN...` writes a page about a campaign or runs; `retrain watch RUN` serves a live one."""

from __future__ import annotations

import json
import threading
import webbrowser
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

import click

from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.kernel.version import __version__
from retrain.text.command_options import html_option, json_option, run_argument, runs_argument

FILE = "report.html"
REPORT_EPILOG = """\b
Examples:
  retrain report logs/campaign_20260301_120000
  retrain report logs/run_a logs/run_b --html both.html

\b
Exit codes: 0 written; 2 usage error, or no run there.
"""
WATCH_EPILOG = """\b
Examples:
  retrain watch logs/train             print the page's address, and serve it until Ctrl-C
  retrain watch campaigns/first        a page that lists the runs of a campaign, and one for each
  retrain watch logs/train --open      open it in the browser, too
  ssh -L 8123:127.0.0.1:8123 machine   and there: retrain watch logs/train --port 8123

Only this machine can reach the page, only with the whole address, and nothing can be changed with it.

\b
Exit codes: 0 ended by Ctrl-C; 1 the port is taken; 2 usage error, or no run and no campaign there.
"""


@click.command("report", epilog=REPORT_EPILOG)
@runs_argument()
@html_option("The page (default: report.html in the campaign or run, or here for several runs).", "--output", "-o")
@json_option("Describe the written page as JSON.")
@click.pass_context
def report(ctx: click.Context, paths: tuple[Path, ...], html: Path | None, as_json: bool) -> None:
    """Write a campaign, or run folders, as one self-contained page: verdicts, curves, completions, health."""
    from retrain.records.files import write_text
    from retrain.report.gather import gather
    from retrain.report.page import plugin_sections, render
    from retrain.text.amounts import counted
    from retrain.verdicts.ledger.looks import InterimLooks

    material = gather(paths)
    study = material.study
    # A comparison on the page has recorded its own look at the results.
    if study is None:
        InterimLooks("report").at(paths)
    file = html or (paths[0] / FILE if len(paths) == 1 else Path(FILE))
    made = f"Made by retrain {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    page = render(material, plugin_sections(material, ctx.obj), folder=file.parent, made=made)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, page.html)
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        fix = "choose another file: --html FILE"
        raise ConfigError(Problem(code="report.unwritable", where=str(file), what=what, fix=fix)) from error
    size = len(page.html.encode("utf-8"))
    if as_json:
        compared = study.comparisons if study else ()
        content = {
            "file": str(file),
            "bytes": size,
            "title": page.title,
            "sections": list(page.sections),
            "figures": page.num_figures,
            "conditions": list(material.source.conditions),
            "shown": list(material.shown),
            "runs": len(material.runs),
            "states": dict(Counter(run.candidate.state for run in material.runs)),
            "unfinished": [run.candidate.name for run in material.unfinished],
            "verdicts": {f"{each.condition} vs {each.baseline}": each.verdict for each in compared},
            "not_compared": material.no_study or None,
            "step_stride": material.stride,
        }
        click.echo(json.dumps(content, indent=2, allow_nan=False))
        return
    contents = f"{counted(len(material.runs), 'run')}, {counted(page.num_figures, 'plot')}"
    click.echo(f"Wrote {file} ({size / 1e6:.1f} MB): {contents}")
    if material.unfinished:
        click.echo(f"{counted(len(material.unfinished), 'run')} did not finish; see the top of the page")


@click.command("watch", epilog=WATCH_EPILOG)
@run_argument()
@click.option("--port", default=0, type=click.IntRange(0, 65535), help="Port on 127.0.0.1 (default: a free one).")
@click.option("--open", "opens", is_flag=True, help="Open the page in the browser.")
def watch(run: Path, port: int, opens: bool) -> None:
    """Serve a page with the curves and completions of RUN, or of each run of a campaign, to this machine only."""
    from retrain.records.run import is_run
    from retrain.records.runs.campaign_status import read_campaign
    from retrain.report.watch_server import WatchServer
    from retrain.verdicts.ledger.looks import InterimLooks

    if not is_run(run) and read_campaign(run) is None:
        what, fix = "there is neither a run nor a campaign here", "name the folder of one: `retrain status` lists them"
        raise ConfigError(Problem(code="run.not-found", where=str(run), what=what, fix=fix))
    interim = InterimLooks("watch")
    interim.at([run])
    try:
        server = WatchServer(run, port, on_look=interim.of)
    except OSError as error:
        what = f"port {port} cannot be used: {error.strerror or error}"
        raise RetrainError(Problem(code="report.port-unusable", what=what, fix="choose another: --port N")) from error
    try:
        with server:
            click.echo(f"{server.url}\nThe page follows {run} until Ctrl-C.")
            if opens:
                webbrowser.open(server.url)
            threading.Event().wait()
    except KeyboardInterrupt:
        click.echo("No longer watched.")
