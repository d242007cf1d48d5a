"""`retrain plugins`: everything that is plugged in, by kind, and what failed to load."""

from __future__ import annotations

import json
from typing import Any

import click

from retrain.plugins.manager import Plugins
from retrain.types import Kind


@click.command("plugins")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.pass_obj
def command(plugins: Plugins, as_json: bool) -> None:
    """List every registered name by kind, with its distribution, and every plugin that failed to load."""
    content = inventory(plugins)
    if as_json:
        click.echo(json.dumps(content, indent=2))
        return
    for kind, rows in content["kinds"].items():
        if rows:
            click.secho(kind, bold=True)
            for row in rows:
                twice = "  CLASH: two owners" if row["clash"] else ""
                click.echo(f"  {row['name']:<20} {row['summary']}  ({row['distribution']} {row['version']}){twice}")
    for failure in content["failures"]:
        click.secho(f"failed to load: {failure['distribution']} ({failure['source']}): {failure['error']}", fg="red")


def inventory(plugins: Plugins) -> dict[str, Any]:
    """The same as plain data: `kinds` by kind, and `failures`."""
    kinds = {
        kind.value: [
            {
                "name": entry.spec.name,
                "summary": entry.spec.summary,
                "aliases": list(entry.spec.aliases),
                "distribution": entry.owner.distribution,
                "version": entry.owner.version,
                "source": entry.owner.source,
                "clash": len(plugins.find(kind, entry.spec.name)) > 1,
            }
            for entry in plugins.registered(kind)
        ]
        for kind in Kind
    }
    failures = [{"distribution": str(f.owner), "source": f.owner.source, "error": f.error} for f in plugins.failures]
    return {"kinds": kinds, "failures": failures}
