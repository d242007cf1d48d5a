"""`retrain init`: writes a starting configuration, never over an existing file."""

from __future__ import annotations

import json
from pathlib import Path

import click

from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.plugins.resolve import resolve
from retrain.rooms.cli.templates import DEFAULT_FILE, exists_error, refuse_existing, template_text
from retrain.rooms.session.streams import is_interactive

DEFAULT_TEMPLATE = "default"
SCHEMA_COMMAND = "schema"
SCHEMA_FILE = "retrain.schema.json"
EPILOG = """\b
Examples:
  retrain init --list                       list the templates
  retrain init --template tiny              write a run that trains on a CPU in a minute
  retrain init --interactive                ask a few questions first
  retrain init -t experiment -o exp.toml    choose another file name

\b
Exit codes: 0 written; 2 usage error, or the file exists already.
"""


@click.command("init", epilog=EPILOG)
@click.option("--template", "-t", metavar="NAME", help=f"Which template (see --list). Default: {DEFAULT_TEMPLATE}.")
@click.option("--interactive", "-i", "is_dialog", is_flag=True, help="Ask for the main values; needs a terminal.")
@click.option("--output", "-o", type=click.Path(path_type=Path), help="File to write, instead of the template's own.")
@click.option("--list", "-l", "as_list", is_flag=True, help="List the templates and exit.")
@click.option("--json", "as_json", is_flag=True, help="As JSON: the list, or what was written.")
@click.pass_obj
def command(
    plugins: Plugins, template: str | None, is_dialog: bool, output: Path | None, as_list: bool, as_json: bool
) -> None:
    """Write a starting configuration into this folder."""
    if as_list:
        _list(plugins, as_json=as_json)
        return
    if is_dialog:
        if as_json:
            raise click.UsageError("--interactive and --json exclude each other")
        template, file, text = _asked(plugins, template, output)
    else:
        template = template or DEFAULT_TEMPLATE
        file, text = template_text(plugins, template, output)
        refuse_existing(file)
    _write_with_schema(plugins, file, text)
    words = [] if str(file) == DEFAULT_FILE else [str(file)]
    following = [" ".join(["retrain", *verb, *words]) for verb in (["explain"], [])]
    if as_json:
        click.echo(json.dumps({"file": str(file), "template": template, "next": following}, indent=2))
        return
    if is_dialog:
        click.echo(f"\n{text.rstrip()}\n")
    click.echo("\n  ".join([f"Wrote {file} ({template}). Next:", *following]))


def _asked(plugins: Plugins, template: str | None, output: Path | None) -> tuple[str, Path, str]:
    if not is_interactive():
        what = "there is no terminal for the questions"
        fix = "use `retrain init --template NAME`; `retrain init --list` shows the names"
        raise ConfigError(Problem(where="--interactive", what=what, fix=fix))
    from retrain.rooms.cli.init_dialog import ask  # imports tomlkit and the loader

    return ask(plugins, template, output)


def _list(plugins: Plugins, *, as_json: bool) -> None:
    templates = plugins.registered(Kind.TEMPLATE)
    rows = [{"name": e.spec.name, "summary": e.spec.summary, "distribution": str(e.owner)} for e in templates]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    width = max(len(row["name"]) for row in rows)
    for row in rows:
        click.echo(f"{row['name']:<{width}}  {row['summary']} ({row['distribution']})")


def _write_with_schema(plugins: Plugins, file: Path, text: str) -> None:
    """Write the file, and beside it the JSON Schema that its first line names, so that editors complete its keys.

    Without a plugin that provides the command `schema`, write the file alone.
    """
    if not plugins.find(Kind.COMMAND, SCHEMA_COMMAND):
        _write(file, text)
        return
    _write(file, f"#:schema ./{SCHEMA_FILE}\n{text}")
    command: click.Command = resolve(plugins, Kind.COMMAND, SCHEMA_COMMAND, where="init").target
    words = ["--quiet", "--output", str(file.with_name(SCHEMA_FILE))]
    command.main(words, standalone_mode=False, obj=plugins, parent=click.get_current_context())  # keeps `-h`


def _write(file: Path, text: str) -> None:
    try:
        with file.open("x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError:  # created in the meantime
        raise exists_error(file) from None
    except OSError as error:
        fix = "change folder, or name another file with --output FILE"
        what = f"cannot be written: {error.strerror}"
        raise ConfigError(Problem(where=str(file), what=what, fix=fix)) from None
