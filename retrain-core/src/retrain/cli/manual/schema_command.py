"""`retrain schema`: the JSON Schema of the configuration, for editors and other programs."""

from __future__ import annotations

import json
from pathlib import Path

import click

from retrain.cli.manual.json_schema import configuration_schema
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins

EPILOG = """\b
Examples:
  retrain schema -o retrain.schema.json     beside a configuration whose first line names it
  retrain schema | jq .properties           list the tables

\b
Exit codes: 0; 2 usage error, or FILE cannot be written.
"""


@click.command("schema", epilog=EPILOG)
@click.option("--output", "-o", metavar="FILE", type=click.Path(path_type=Path), help="Write to FILE, not to stdout.")
@click.option("--quiet", "-q", is_flag=True, help="Print no confirmation.")
@click.pass_obj
def command(plugins: Plugins, output: Path | None, quiet: bool) -> None:
    """Print the JSON Schema (draft 2020-12) of the configuration with the tables of all installed plugins.

    An editor with Taplo (VS Code: Even Better TOML) completes and checks the keys of a file that begins with
    `#:schema ./retrain.schema.json`, provided that file exists. It needs no network. Run this again after installing
    or removing a plugin.
    """
    text = json.dumps(configuration_schema(plugins), indent=2, ensure_ascii=False) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        fix = "name a file in an existing folder that you can write to"
        raise ConfigError(Problem(where=str(output), what=f"cannot be written: {error}", fix=fix)) from None
    if not quiet:
        click.echo(f"Wrote {output}")
