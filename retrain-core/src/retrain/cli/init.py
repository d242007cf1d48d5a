"""`retrain init`: writes a starting configuration, never over an existing one."""

from __future__ import annotations

import json
from pathlib import Path

import click

from retrain.errors import ConfigError, Problem
from retrain.plugins.manager import Plugins
from retrain.plugins.resolve import resolve
from retrain.types import Kind

DEFAULT_FILE = "retrain.toml"


@click.command("init")
@click.option("--template", "-t", default="default", metavar="NAME", help="Which template (see --list).")
@click.option("--list", "-l", "as_list", is_flag=True, help="List the templates and exit.")
@click.option("--json", "as_json", is_flag=True, help="With --list: as JSON.")
@click.pass_obj
def command(plugins: Plugins, template: str, as_list: bool, as_json: bool) -> None:
    """Write a starting configuration into this folder."""
    templates = plugins.registered(Kind.TEMPLATE)
    if as_list:
        rows = [{"name": e.spec.name, "summary": e.spec.summary, "distribution": str(e.owner)} for e in templates]
        if as_json:
            click.echo(json.dumps(rows, indent=2))
            return
        for row in rows:
            click.echo(f"{row['name']:<12} {row['summary']} ({row['distribution']})")
        return
    found = resolve(plugins, Kind.TEMPLATE, template, where="--template")
    text = found.target() if callable(found.target) else found.target
    file = Path(found.traits if isinstance(found.traits, str) else DEFAULT_FILE)
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:
        fix = "remove it, or change folder"
        raise ConfigError(
            Problem(where=str(file), what="the file exists already; nothing was written", fix=fix)
        ) from None
    except OSError as error:
        raise ConfigError(
            Problem(where=str(file), what=f"cannot be written: {error.strerror}", fix="change folder")
        ) from None
    name = "" if file.name == DEFAULT_FILE else f" {file}"
    click.echo(f"Wrote {file} ({template}). Next:\n  retrain explain{name}\n  retrain{name}")
