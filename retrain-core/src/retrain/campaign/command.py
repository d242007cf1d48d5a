"""`retrain FILE` for a file with `[campaign]`: run the campaign."""

from __future__ import annotations

import click

from retrain.campaign.load import load_campaign
from retrain.campaign.session import run_campaign
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.text.command_options import config_argument, quiet_option

EPILOG = """\b
Examples:
  retrain campaign.toml                       run it, or finish what is missing
  retrain campaign.toml --campaign-parallel   runs in parallel
  retrain campaign.toml -q                    only failures and the outcome
  retrain --resume logs/campaign_20260103     finish the campaign in that folder

\b
Exit codes: 0 all runs are done; 1 a run failed after its retries; 2 usage or configuration error;
            75 stopped by a signal, the same command continues.
"""


@click.command(
    "campaign", context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}, epilog=EPILOG
)
@click.option("--new", "is_new", is_flag=True, help="Start a new campaign even if this one was run before.")
@click.option("--beyond-plan", is_flag=True, help="Add seeds or conditions to a campaign whose plan is sealed.")
@quiet_option("Print only warnings, failures and the outcome.")
@config_argument("CONFIG [--KEY VALUE]...")
@click.pass_obj
def command(plugins: Plugins, is_new: bool, beyond_plan: bool, is_quiet: bool, arguments: tuple[str, ...]) -> None:
    """Run the conditions x seeds of CONFIG; run it again to finish what is missing, or what was added to the file.

    Flags override the keys of all runs. `--resume DIR` finishes the campaign in that folder.
    """
    campaign = load_campaign(arguments, plugins)
    if "campaign" not in campaign.file_tables:
        what = "has no [campaign] table"
        fix = "add one: `retrain init --template campaign` shows how"
        raise ConfigError(Problem(where=campaign.config.source or "command line", what=what, fix=fix))
    run_campaign(campaign, plugins, is_new=is_new, is_beyond_plan=beyond_plan, is_quiet=is_quiet)
