"""`retrain FILE` for a file with `[campaign]`: run the campaign."""

from __future__ import annotations

import click

from retrain.campaign.load import load_campaign
from retrain.campaign.session import run_campaign
from retrain.errors import ConfigError, Problem
from retrain.plugins.manager import Plugins

NEW = "--new"
HELP_FLAGS = {"-h", "--help"}


@click.command(
    "campaign",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(plugins: Plugins, arguments: tuple[str, ...]) -> None:
    """Run conditions x seeds as CONFIG says; again, to finish what is missing.

    Flags override the keys of all runs. `--resume DIR` finishes the campaign in that folder, `--new` begins another one
    even though this very campaign was run before.
    """
    if HELP_FLAGS & set(arguments):
        click.echo(command.get_help(click.Context(command, info_name="retrain")))
        return
    campaign = load_campaign([word for word in arguments if word != NEW], plugins)
    if "campaign" not in campaign.file_tables:
        what = "has no [campaign] table"
        fix = "add one: `retrain init --template campaign` shows how"
        raise ConfigError(Problem(where=campaign.config.source or "command line", what=what, fix=fix))
    run_campaign(campaign, plugins, is_new=NEW in arguments)
