"""`retrain FILE` for a file with `[campaign]`: run the campaign."""

from __future__ import annotations

import click

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.campaign.load import load_campaign
from retrain.rooms.campaign.session import run_campaign

EPILOG = """\b
Examples:
  retrain campaign.toml                       run it, or finish what is missing
  retrain campaign.toml --campaign-parallel   with the runs side by side
  retrain campaign.toml -q                    failures and the outcome alone
  retrain --resume logs/campaign_20260103     finish the campaign in that folder

\b
Exit codes: 0 all runs are done; 1 a run failed after its retries; 2 usage or configuration error;
            75 stopped by a signal, the same command goes on.
"""


@click.command(
    "campaign", context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}, epilog=EPILOG
)
@click.option("--new", "is_new", is_flag=True, help="Begin another one even though this very campaign was run before.")
@click.option("--quiet", "-q", "is_quiet", is_flag=True, help="Say warnings, failures and the outcome, nothing else.")
@click.argument("arguments", metavar="CONFIG [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(plugins: Plugins, is_new: bool, is_quiet: bool, arguments: tuple[str, ...]) -> None:
    """Run conditions x seeds as CONFIG says; again, to finish what is missing.

    Flags override the keys of all runs. `--resume DIR` finishes the campaign in that folder.
    """
    campaign = load_campaign(arguments, plugins)
    if "campaign" not in campaign.file_tables:
        what = "has no [campaign] table"
        fix = "add one: `retrain init --template campaign` shows how"
        raise ConfigError(Problem(where=campaign.config.source or "command line", what=what, fix=fix))
    run_campaign(campaign, plugins, is_new=is_new, is_quiet=is_quiet)
