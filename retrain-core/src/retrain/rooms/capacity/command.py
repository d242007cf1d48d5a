"""`retrain capacity CONFIG`: memory and time, before the run."""

from __future__ import annotations

import json

import click

from retrain.kernel.plugins.manager import Plugins
from retrain.rooms.capacity.forecast import forecast
from retrain.rooms.capacity.pilot import run_pilot
from retrain.rooms.capacity.show import text
from retrain.rooms.session.configure import load_checked

EPILOG = """\b
Examples:
  retrain capacity                        ./retrain.toml on this machine
  retrain capacity --batch-size 16        with one value changed
  retrain capacity my.toml --pilot 2      measured over two real steps

\b
Exit codes: 0 done; 1 a pilot failed; 2 usage or configuration error.
"""


@click.command(
    "capacity", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": True}, epilog=EPILOG
)
@click.option("--pilot", type=click.IntRange(min=1), metavar="N", help="Measure N real steps; nothing is kept of them.")
@click.option("--prompt-tokens", type=click.IntRange(min=1), default=None, help="Length of the longest prompt.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.argument("arguments", metavar="[CONFIG] [--KEY VALUE]...", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def command(
    plugins: Plugins, pilot: int | None, prompt_tokens: int | None, as_json: bool, arguments: tuple[str, ...]
) -> None:
    """Estimate how much memory and time CONFIG with its overrides needs here, without loading the model."""
    config = load_checked(arguments, plugins).config
    past = run_pilot(arguments, pilot) if pilot else None
    found = forecast(config, plugins, prompt_tokens=prompt_tokens or 0, fetch=True, past=past)
    click.echo(json.dumps(found.as_data(), indent=2, allow_nan=False) if as_json else text(found))
