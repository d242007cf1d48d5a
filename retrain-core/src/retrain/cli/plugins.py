"""`retrain plugins`: every registered name, its origin, and the parts that a configuration selects."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from retrain.cli.backends import backends, print_backends, promised, short_file
from retrain.kernel.declared import Kind
from retrain.kernel.registry import Plugins
from retrain.records.identity.imports import module_file, part_file
from retrain.run.configure import DEFAULT_FILE, load_with_problems
from retrain.run.selected import selected_parts
from retrain.run.tables import registered_tables
from retrain.text.command_options import config_argument, json_option
from retrain.text.secrets import hide
from retrain.text.terminal_text import printable

FILES_FROM_COLUMNS = 110  # terminal width from which files are shown; `--json` and pipes always show them
GAP = 2  # spaces between columns
OK = "ok"
KINDS = {kind.value.replace(" ", "-"): kind for kind in Kind}
EPILOG = """\b
Examples:
  retrain plugins                          list everything registered
  retrain plugins my.toml                  and what that file selects
  retrain plugins --kind transform --json
  retrain plugins --kind backend           each with its capabilities, options and missing dependencies

\b
Exit codes: 0 done; 2 usage or configuration error.
"""


@click.command("plugins", context_settings={"ignore_unknown_options": True}, epilog=EPILOG)
@click.option("--kind", type=click.Choice(list(KINDS)), metavar="KIND", help="Only this kind, such as data-source.")
@json_option()
@config_argument()
@click.pass_obj
def command(plugins: Plugins, kind: str | None, as_json: bool, arguments: tuple[str, ...]) -> None:
    """List every registered name with its distribution, version and file, and every plugin that failed to load.

    With CONFIG, or a retrain.toml in this folder, also show the modules in its search paths, which are imported for
    this, and the parts that it selects. With --kind backend show what each declares, takes and lacks.
    """
    content = inventory(plugins, kinds=[KINDS[kind]] if kind else list(Kind))
    if kind == Kind.BACKEND:
        content |= {"backends": backends(plugins), "promised": promised(plugins)}
    if arguments or DEFAULT_FILE.is_file():
        with redirect_stdout(sys.stderr):  # plugins may print when they are imported
            content |= _of_configuration(arguments, plugins, KINDS.get(kind or ""))
    if as_json:
        click.echo(json.dumps(hide(content), indent=2))
    else:
        _show(hide(content))


def inventory(plugins: Plugins, kinds: Sequence[Kind] = tuple(Kind)) -> dict[str, Any]:
    """What is installed, as plain data: `kinds`, `failures`, and what the environment has `left_out`."""
    rows = {
        kind.value: [
            {
                "name": entry.spec.name,
                "summary": entry.spec.summary,
                "aliases": list(entry.spec.aliases),
                "distribution": entry.owner.distribution,
                "version": entry.owner.version,
                "source": entry.owner.source,
                "file": part_file(entry.spec),
                "clash": len(plugins.find(kind, entry.spec.name)) > 1,
            }
            for entry in plugins.registered(kind)
        ]
        for kind in kinds
    }
    failures = [{"distribution": str(f.owner), "source": f.owner.source, "error": f.error} for f in plugins.failures]
    return {"kinds": rows, "failures": failures, "left_out": sorted(plugins.left_out)}


def _of_configuration(arguments: Sequence[str], plugins: Plugins, only: Kind | None) -> dict[str, Any]:
    config, _, problems = load_with_problems(arguments, plugins)
    selected = [
        asdict(part) | {"kind": part.kind.value, "problem": str(part.problem) if part.problem else None}
        for part in selected_parts(config, plugins, registered_tables(plugins))
        if only in (None, part.kind)
    ]
    paths = list(config.plugins.search_paths)
    return {
        "config": config.source or "(defaults)",
        "runtime": {"search_paths": paths, "strict": config.plugins.strict},
        "discovered": searched_modules(paths),
        "selected": selected,
        "problems": [str(problem) for problem in problems],
    }


def _show(content: dict[str, Any]) -> None:
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 4096  # a pipe gets full lines
    with console.capture() as capture:
        _print(console, content)
    text = capture.get()
    if not console.is_terminal:
        text = "\n".join(line.rstrip() for line in text.split("\n"))
    click.echo(text, nl=False)


def _print(console: Console, content: dict[str, Any]) -> None:
    named = [row for rows in content["kinds"].values() for row in rows]
    columns = ("name", "distribution", "file")
    widths = {key: max((len(_cell(row, key)) for row in named), default=0) + GAP for key in columns}
    if "backends" in content:
        print_backends(console, content)
    for kind, rows in content["kinds"].items():
        if rows and "backends" not in content:
            console.print(Text(kind, style="bold"))
            table = _grid(console, widths)
            for row in rows:
                table.add_row(*_cells(row, console))
            console.print(table)
    if "config" in content:
        _print_configuration(console, content)
    for problem in content.get("problems", ()):
        console.print(Text("\n".join(map(printable, problem.split("\n"))), style="red"), soft_wrap=True)
    for failure in content["failures"]:
        line = f"failed to load: {failure['distribution']} ({failure['source']}): {failure['error']}"
        console.print(Text(_line(line), style="red"), soft_wrap=True)
    if content["left_out"]:
        names = ", ".join(content["left_out"])
        console.print(Text(f"left out by RETRAIN_PLUGINS or RETRAIN_BLOCK: {names}", style="yellow"), soft_wrap=True)


def _grid(console: Console, widths: dict[str, int]) -> Table:
    table = Table.grid(padding=(0, GAP), pad_edge=True)
    table.add_column(min_width=widths["name"], no_wrap=True)
    table.add_column(min_width=widths["distribution"], no_wrap=True, style="cyan")
    if _has_room(console):
        table.add_column(min_width=widths["file"], no_wrap=True, style="dim")
    table.add_column(no_wrap=True, overflow="ellipsis")
    return table


def _has_room(console: Console) -> bool:
    return console.width >= FILES_FROM_COLUMNS


def _cells(row: dict[str, Any], console: Console) -> list[Text]:
    summary = Text(_line(row["summary"]))
    if row["clash"]:
        summary = Text("CLASH: two owners  ", style="red") + summary
    cells = [Text(_cell(row, "name")), Text(_cell(row, "distribution"))]
    return [*cells, *([Text(_cell(row, "file"))] if _has_room(console) else []), summary]


def _cell(row: dict[str, Any], key: str) -> str:
    if key == "distribution":
        return _line(f"{row['distribution']} {row['version']}")
    return _line(short_file(row["file"]) if key == "file" else row[key])


def _print_configuration(console: Console, content: dict[str, Any]) -> None:
    console.print(Text(f"\nselected by {content['config']}", style="bold"))
    table = Table.grid(padding=(0, GAP), pad_edge=True)
    for _ in range(4):
        table.add_column(no_wrap=True, overflow="ellipsis")
    for part in content["selected"]:
        source = Text(part["source"] or "not provided", style="cyan" if part["source"] else "red")
        if part["problem"] and part["source"]:
            source = Text("two owners", style="red")
        file = Text(_line(short_file(part["file"])), style="dim")
        table.add_row(Text(_line(part["key"])), Text(_line(part["name"])), source, file)
    console.print(table)
    paths = ", ".join(content["runtime"]["search_paths"])
    if not content["discovered"]:
        console.print(Text(f"\nno modules in the search paths: {paths}", style="dim"), soft_wrap=True)
        return
    console.print(Text(f"\nmodules in the search paths: {paths}", style="bold"))
    for module in content["discovered"]:
        style = "" if module["status"] == OK else "red"
        line = f"{module['module']}  {short_file(module['file'])}  {module['status']}"
        console.print(Text(f"  {printable(line)}", style=style), soft_wrap=True)


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def searched_modules(search_paths: Sequence[str]) -> list[dict[str, str]]:
    """`module`, `file` and `status` of every public module below the search paths, imported now.

    What a module prints goes to stderr. The status is `ok`, or `error: ` and what the import raised.
    """
    found = []
    for path in dict.fromkeys(prefix.strip("./").replace("/", ".") for prefix in search_paths):
        try:
            package = importlib.util.find_spec(path) if path else None
        except (ImportError, ValueError):
            continue
        folders = (package.submodule_search_locations if package else None) or []
        names = [info.name for info in pkgutil.iter_modules(folders, f"{path}.")]
        for name in (name for name in names if not name.rpartition(".")[2].startswith("_")):
            found.append({"module": name, "file": module_file(name), "status": _import_status(name)})
    return found


def _import_status(module: str) -> str:
    try:
        with redirect_stdout(sys.stderr):
            importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever one of the user's files does, the others are listed too
        return f"error: {type(error).__name__}: {error}"
    return OK
