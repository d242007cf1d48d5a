"""`retrain diff A B`: results of two runs, and why they differ."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import click

from retrain.inspect.diff import RunDiff, compare_runs
from retrain.text.command_options import json_option
from retrain.verdicts.ledger.interim import InterimLooks

PIPED_WIDTH = 10_000  # do not wrap lines when the output is a file
_FOLDER = click.Path(path_type=Path)
EPILOG = """\b
Examples:
  retrain diff logs/run_a logs/run_b
  retrain diff logs/run_a logs/run_b --json

\b
Exit codes: 0 done, whatever differs; 2 usage error, or no run there.
"""


@click.command("diff", epilog=EPILOG)
@click.argument("a", type=_FOLDER)
@click.argument("b", type=_FOLDER)
@json_option()
def command(a: Path, b: Path, as_json: bool) -> None:
    """Compare the run folders A and B: results, settings, code, packages, data, and where they diverge."""
    diff = compare_runs(a, b)
    InterimLooks("diff", partial(click.echo, err=True)).at([a, b])
    if as_json:
        click.echo(json.dumps(diff.as_data(), indent=2, allow_nan=False, default=str))
    else:
        _print(diff)


def _print(diff: RunDiff) -> None:
    from rich.console import Console

    from retrain.inspect.diff_show import picture

    width = None if sys.stdout.isatty() else PIPED_WIDTH
    Console(highlight=False, width=width).print(picture(diff))
