"""`retrain report CAMPAIGN | RUN...`: everything about a campaign or runs as one page."""

from __future__ import annotations

import json
from collections import Counter
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import click

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.version import __version__
from retrain.text.command_options import html_option, json_option, runs_argument

FILE = "report.html"
EPILOG = """\b
Examples:
  retrain report logs/campaign_20260301_120000
  retrain report logs/run_a logs/run_b --html both.html

\b
Exit codes: 0 written; 2 usage error, or no run there.
"""


@click.command("report", epilog=EPILOG)
@runs_argument()
@html_option("The page (default: report.html in the campaign or run, or here for several runs).", "--output", "-o")
@json_option("Describe what was written as JSON.")
@click.pass_context
def command(ctx: click.Context, paths: tuple[Path, ...], html: Path | None, as_json: bool) -> None:
    """Write a campaign, or run folders, as one self-contained page: verdicts, curves, completions, health."""
    from retrain.records.files import write_text
    from retrain.report.gather import gather
    from retrain.report.page import plugin_sections, render
    from retrain.text.amounts import counted
    from retrain.verdicts.ledger.looks import InterimLooks

    material = gather(paths)
    if material.study is None:  # else the comparison on the page is on record
        InterimLooks("report", partial(click.echo, err=True)).at(paths)
    file = html or (paths[0] / FILE if len(paths) == 1 else Path(FILE))
    made = f"Made by retrain {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC."
    page = render(material, plugin_sections(material, ctx.obj), folder=file.parent, made=made)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text(file, page.html)
    except OSError as error:
        what = f"cannot be written: {error.strerror or error}"
        raise ConfigError(Problem(where=str(file), what=what, fix="choose another file: --html FILE")) from error
    states = Counter(run.candidate.state for run in material.runs)
    size = len(page.html.encode("utf-8"))
    if as_json:
        study = material.study
        content = {
            "file": str(file),
            "bytes": size,
            "title": page.title,
            "sections": list(page.sections),
            "figures": page.num_figures,
            "conditions": list(material.source.conditions),
            "shown": list(material.shown),
            "runs": len(material.runs),
            "states": dict(states),
            "unfinished": [run.candidate.name for run in material.unfinished],
            "verdicts": {f"{each.condition} vs {each.baseline}": each.verdict for each in study.comparisons}
            if study
            else {},
            "not_compared": material.no_study or None,
            "step_stride": material.stride,
        }
        click.echo(json.dumps(content, indent=2, allow_nan=False))
        return
    contents = f"{counted(len(material.runs), 'run')}, {counted(page.num_figures, 'plot')}"
    click.echo(f"Wrote {file} ({size / 1e6:.1f} MB): {contents}")
    if material.unfinished:
        click.echo(f"{counted(len(material.unfinished), 'run')} did not finish; see the top of the page")
