"""`retrain signal CAMPAIGN | RUN...`: what was drawn and what it was good for."""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path

import click

from retrain.text.command_options import json_option, runs_argument

MOST = 5
PIPED_WIDTH = 10_000  # do not wrap lines when the output is a file
EPILOG = """\b
Examples:
  retrain signal logs/tiny
  retrain signal logs/campaign_20260301_120000
  retrain signal logs/tiny --json

\b
Exit codes: 0 done; 1 no run could be read; 2 usage error, or no run there.
"""


@click.command("signal", epilog=EPILOG)
@runs_argument()
@click.option("--most", default=MOST, show_default=True, type=click.IntRange(min=0), help="Prompts of a run to list.")
@json_option("As JSON, with every prompt.")
def command(paths: tuple[Path, ...], most: int, as_json: bool) -> None:
    """Account for every token that was drawn: what taught, what did not and why, and what a held-out point cost.

    For a single run also by prompt and difficulty, with the chance that the next group teaches, and where credit went.
    """
    from retrain.inspect.signal.account import Account, try_account
    from retrain.inspect.signal.summary import as_data, by_condition, pool_data
    from retrain.records.runs.source import find_runs
    from retrain.verdicts.ledger.interim import InterimLooks

    source = find_runs(paths)
    InterimLooks("signal", partial(click.echo, err=True)).at(paths)
    found = {candidate.name: try_account(candidate) for candidate in source.candidates}
    accounts = [each for each in found.values() if isinstance(each, Account)]
    absent = [(name, each) for name, each in found.items() if isinstance(each, str)]
    if as_json:
        content = {
            "runs": [as_data(each) for each in accounts],
            "conditions": [pool_data(each) for each in by_condition(accounts)],
            "absent": [{"run": name, "why": why} for name, why in absent],
        }
        click.echo(json.dumps(content, indent=2, allow_nan=False))
    else:
        from rich.console import Console

        from retrain.inspect.signal.show import overview, run_picture

        console = Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)
        is_single = len(accounts) == 1 and not absent
        console.print(run_picture(accounts[0], most) if is_single else overview(by_condition(accounts), absent))
    if not accounts:
        sys.exit(1)
