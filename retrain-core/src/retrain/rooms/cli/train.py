"""`retrain [CONFIG] [overrides]`: train."""

from __future__ import annotations

from contextlib import nullcontext

import click

from retrain.kernel.plugins.manager import Plugins

EPILOG = """\b
Examples:
  retrain                               as ./retrain.toml says
  retrain my.toml --seed 42 --lr 1e-4   with two values changed
  retrain --set training.lr=1e-4        the same key by its place in the file
  retrain my.toml -q > run.log          the last lines alone
  retrain --resume logs/train           go on with a run that was stopped

`retrain explain --keys` lists every key, its flag and its default; `retrain explain CONFIG` shows what would be done.

\b
Exit codes: 0 done; 1 the run failed; 2 usage or configuration error;
            75 stopped by a signal with its state saved, `--resume` continues it.
"""


@click.command(
    "train", context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}, epilog=EPILOG
)
@click.option("--quiet", "-q", "is_quiet", is_flag=True, help="Say warnings, errors and how it ended, nothing else.")
@click.argument("arguments", metavar="[CONFIG] [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(plugins: Plugins, is_quiet: bool, arguments: tuple[str, ...]) -> None:
    """Train as CONFIG says (default: ./retrain.toml); `--kebab-case` flags override its keys."""
    from retrain.rooms.session.collector import paused_collector  # help and completion import nothing of the loop

    with paused_collector():
        from retrain.rooms.session.configure import load_checked

        checked = load_checked(arguments, plugins)
        from retrain.rooms.session.session import train  # only when there is something to train

        with plugins.notify("retrain_console", plugins=plugins, is_quiet=is_quiet) or nullcontext():
            train(checked.config, plugins, checked.flow, checked.keys)
