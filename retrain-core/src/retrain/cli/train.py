"""`retrain [CONFIG] [overrides]`: train."""

from __future__ import annotations

import click

from retrain.kernel.registry import Plugins
from retrain.text.command_options import config_argument, quiet_option

EPILOG = """\b
Examples:
  retrain                               train with ./retrain.toml
  retrain my.toml --seed 42 --lr 1e-4   change two values
  retrain --set training.lr=1e-4        set a key by its table and name
  retrain my.toml -q > run.log          print only the outcome
  retrain --resume logs/train           continue a stopped run

`retrain explain --keys` lists every key, its flag and its default; `retrain explain CONFIG` shows what a run would do.

\b
Exit codes: 0 done; 1 the run failed; 2 usage or configuration error;
            75 stopped by a signal with its state saved, `--resume` continues it.
"""


@click.command(
    "train", context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]}, epilog=EPILOG
)
@quiet_option("Print only warnings, errors and the outcome.")
@config_argument()
@click.pass_obj
def command(plugins: Plugins, is_quiet: bool, arguments: tuple[str, ...]) -> None:
    """Train with CONFIG (default: ./retrain.toml); `--kebab-case` flags override its keys."""
    from retrain.run.collector import paused_collector  # keeps the loop out of help and completion

    with paused_collector():
        from retrain.run.configure import load_checked, refuse_defaults

        checked = load_checked(arguments, plugins, starts_run=True)
        refuse_defaults(checked.config, arguments)
        from retrain.observe.console.console import run_console
        from retrain.run.session import train  # only after the checks

        with run_console(plugins, is_quiet=is_quiet):
            train(checked, plugins)
