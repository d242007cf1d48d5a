"""`retrain [CONFIG] [overrides]`: train."""

from __future__ import annotations

import click

from retrain.cli.console import run_console
from retrain.loop.configure import load_checked
from retrain.plugins.manager import Plugins


@click.command(
    "train",
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False, "help_option_names": []},
    add_help_option=False,
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(plugins: Plugins, arguments: tuple[str, ...]) -> None:
    """Train as CONFIG says (default: ./retrain.toml); `--kebab-case` flags override its keys."""
    if {"-h", "--help"} & set(arguments):
        click.echo(command.get_help(click.Context(command, info_name="retrain")))
        click.echo("\n`retrain explain --keys` lists every key, its flag and its default.")
        return
    checked = load_checked(arguments, plugins)
    from retrain.loop.session import train  # the loop is imported only when there is something to train

    with run_console(plugins):
        train(checked.config, plugins, checked.flow, checked.keys)
