"""`retrain plugins`: every registered name, its origin, and the parts that a configuration selects."""

from __future__ import annotations

import importlib.util
import json
import pkgutil
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from retrain.credit.configured_loss import capability_fields
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Capabilities, Kind
from retrain.kernel.plugins.dotted_path import module_of
from retrain.kernel.plugins.first_party import promised_names, provider
from retrain.kernel.plugins.missing import install_line
from retrain.kernel.plugins.requirements import required_packages
from retrain.kernel.registry import Plugins, Registered
from retrain.records.identity.code import module_file, part_file
from retrain.run.check import DOTTED, Selected, selected_parts
from retrain.run.configure import DEFAULT_FILE, load_with_problems
from retrain.run.tables import registered_tables
from retrain.text.command_options import config_argument, json_option
from retrain.text.secrets import hide
from retrain.text.tables import table_lines
from retrain.text.terminal_text import harmless_lines, printable

OK = "ok"
KINDS = {kind.value.replace(" ", "-"): kind for kind in Kind}
RANGE = {  # keywords of JSON Schema, and how they are shown
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minLength": "length at least",
    "maxLength": "length at most",
    "minItems": "entries at least",
}
EPILOG = """\b
Examples:
  retrain plugins                          list everything registered
  retrain plugins my.toml                  and the parts that the file selects
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

    With CONFIG, or a retrain.toml in this folder, also show the modules in its search paths, imported for this,
    and the parts that it selects. With --kind backend show the capabilities, options and missing packages of each.
    """
    content = inventory(plugins, kinds=[KINDS[kind]] if kind else list(Kind))
    if kind == Kind.BACKEND:
        rows = [_row(entry, plugins) for entry in plugins.registered(Kind.BACKEND)]
        content |= {"backends": rows, "promised": promised(plugins)}
    if arguments or DEFAULT_FILE.is_file():
        # A plugin may print when it is imported, and so spoil JSON on stdout.
        with redirect_stdout(sys.stderr):
            content |= _of_configuration(arguments, plugins, KINDS.get(kind or ""))
    if as_json:
        click.echo(json.dumps(hide(content), indent=2))
    else:
        click.echo("\n".join(_lines(hide(content))))


def inventory(plugins: Plugins, kinds: Sequence[Kind] = tuple(Kind)) -> dict[str, Any]:
    """The installed parts, as plain data: `kinds`, `failures`, and the distributions `left_out` by the environment."""
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
        {
            **asdict(part),
            "kind": part.kind.value,
            "problem": str(part.problem) if part.problem else None,
            "file": _file_of(part, config, plugins),
        }
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


def _file_of(part: Selected, config: Config, plugins: Plugins) -> str:
    if part.source == DOTTED:
        return module_file(module_of(part.name, config.plugins.search_paths))
    entries = plugins.find(part.kind, part.name)
    return part_file(entries[0].spec) if entries else ""


def _lines(content: dict[str, Any]) -> Iterator[str]:
    rows = [row for rows in content["kinds"].values() for row in rows]
    if "backends" in content:
        yield from backend_lines(content)
    else:
        table = _table([_cells(row) for row in rows])
        for kind, rows in content["kinds"].items():
            if rows:
                yield click.style(kind, bold=True)
                yield from islice(table, len(rows))
    if "config" in content:
        yield from _configuration_lines(content)
    for problem in content.get("problems", ()):
        yield click.style(harmless_lines(problem), fg="red")
    for failure in content["failures"]:
        line = f"failed to load: {failure['distribution']} ({failure['source']}): {failure['error']}"
        yield click.style(_line(line), fg="red")
    if content["left_out"]:
        names = ", ".join(content["left_out"])
        yield click.style(f"left out by RETRAIN_PLUGINS or RETRAIN_BLOCK: {names}", fg="yellow")


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Aligned lines, cut off at the edge of a terminal."""
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for line in table_lines([""] * len(rows[0]), rows, num_names=len(rows[0]))[1:] if rows else ():
        shown = f"  {line}"
        yield shown if len(shown) <= width else f"{shown[: width - 1]}…"


def _cells(row: dict[str, Any]) -> list[str]:
    summary = f"CLASH: two owners  {row['summary']}" if row["clash"] else row["summary"]
    return [
        _line(cell)
        for cell in (row["name"], f"{row['distribution']} {row['version']}", short_file(row["file"]), summary)
    ]


def _configuration_lines(content: dict[str, Any]) -> Iterator[str]:
    yield click.style(f"\nselected by {content['config']}", bold=True)
    rows = []
    for part in content["selected"]:
        source = "two owners" if part["problem"] and part["source"] else part["source"] or "not provided"
        rows.append([_line(cell) for cell in (part["key"], part["name"], source, short_file(part["file"]))])
    yield from _table(rows)
    paths = ", ".join(content["runtime"]["search_paths"])
    if not content["discovered"]:
        yield f"\nno modules in the search paths: {paths}"
        return
    yield click.style(f"\nmodules in the search paths: {paths}", bold=True)
    for module in content["discovered"]:
        line = f"  {module['module']}  {short_file(module['file'])}  {module['status']}"
        yield click.style(printable(line), fg=None if module["status"] == OK else "red")


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def searched_modules(search_paths: Sequence[str]) -> list[dict[str, str]]:
    """`module`, `file` and `status` of every public module below the search paths, imported now.

    The modules' output goes to stderr. The status is `ok`, or `error: ` and the exception of the import.
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
            status = OK
            try:
                with redirect_stdout(sys.stderr):
                    importlib.import_module(name)
            # A file may even call sys.exit() when it is imported; the others are listed all the same.
            except (Exception, SystemExit) as error:
                status = f"error: {type(error).__name__}: {error}"
            found.append({"module": name, "file": module_file(name), "status": status})
    return found


def promised(plugins: Plugins) -> list[dict[str, Any]]:
    """First-party backends that are not installed, each with the way to get it."""
    rows = []
    for name in promised_names(Kind.BACKEND):
        distribution = provider(Kind.BACKEND, name)
        if distribution and not plugins.find(Kind.BACKEND, name):
            left_out = f"RETRAIN_PLUGINS or RETRAIN_BLOCK leaves {distribution} out: change that"
            hint = left_out if distribution in plugins.left_out else install_line(distribution)
            rows.append({"name": name, "distribution": distribution, "hint": hint})
    return rows


def _row(entry: Registered, plugins: Plugins) -> dict[str, Any]:
    capabilities = entry.spec.traits if isinstance(entry.spec.traits, Capabilities) else None
    packages = required_packages(entry.owner.distribution)
    missing = [package for package in packages if not package.is_met]
    file = part_file(entry.spec)
    importable = bool(file) and not missing
    options: dict[str, Any] = {}
    try:
        model = entry.spec.load_params()
        options["option_schema"] = option_schema(model) if model else {}
    # The model of options is the plugin's own code: one that fails must not hide the other backends.
    except Exception as error:
        options = {"option_schema": {}, "option_error": f"{type(error).__name__}: {error}"}
    return {
        "name": entry.spec.name,
        "summary": entry.spec.summary,
        "distribution": entry.owner.distribution,
        "version": entry.owner.version,
        "file": file,
        "dependency": {
            "importable": importable,
            "packages": [asdict(package) for package in packages],
            "hint": "" if importable else install_line(entry.owner.distribution),
        },
        "capabilities": capability_fields(capabilities, entry.spec.name, plugins),
        **options,
    }


def option_schema(model: type[BaseModel]) -> dict[str, dict[str, Any]]:
    """`{option: {type, default, choices, range, required, description}}` of a model of options."""
    document = model.model_json_schema(by_alias=True)
    required = document.get("required", ())
    return {
        name: {
            "type": " or ".join(str(form.get("type", "any")) for form in _forms(found)),
            "default": found.get("default"),
            "choices": next((form["enum"] for form in _forms(found) if "enum" in form), None),
            "range": {key: form[key] for form in _forms(found) for key in RANGE if key in form},
            "required": name in required,
            "description": found.get("description", ""),
        }
        for name, found in document.get("properties", {}).items()
    }


def _forms(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The alternative schemas of a value: one, or the members of a union."""
    forms: list[dict[str, Any]] = found.get("anyOf", [found])
    return forms


def backend_lines(content: dict[str, Any]) -> Iterator[str]:
    for row in content["backends"]:
        owner = f"{row['distribution']} {row['version']}  {short_file(row['file'])}"
        yield f"{click.style(printable(row['name']), bold=True)}  {click.style(printable(owner), dim=True)}"
        yield printable(f"  {row['summary']}")
        packages = row["dependency"]["packages"]
        missing = [package["name"] for package in packages if not package["is_met"]]
        installed = ", ".join(f"{package['name']} {package['installed']}" for package in packages if package["is_met"])
        if row["dependency"]["importable"]:
            yield printable(f"  installed     {installed or 'no requirements'}")
        else:
            what = f"lacks {', '.join(missing)}" if missing else "its module is missing"
            yield click.style(printable(f"  not usable    {what}: {row['dependency']['hint']}"), fg="red")
        for name, value in row["capabilities"].items():
            shown = {"True": "yes", "False": "no"}.get(str(value), str(value))
            shown = (", ".join(value) or "none") if isinstance(value, list) else shown
            yield printable(f"  {name:<28}{shown}")
        if "option_error" in row:
            yield click.style(printable(f"  [backend.options] cannot be read: {row['option_error']}"), fg="red")
        else:
            yield "  [backend.options]" if row["option_schema"] else "  no [backend.options]"
        for name, option in row["option_schema"].items():
            limits = [f"{RANGE[key]} {value}" for key, value in option["range"].items()]
            choices = [f"one of {', '.join(map(json.dumps, option['choices']))}"] if option["choices"] else []
            default = "required" if option["required"] else f"default {json.dumps(option['default'])}"
            facts = ", ".join([option["type"], default, *choices, *limits])
            yield printable(f"    {name}  {facts}  {option['description']}")
    for row in content["promised"]:
        yield printable(f"{row['name']}  not installed: {row['hint']}")


def short_file(file: str) -> str:
    """A file relative to the import folder that holds it, or to this one."""
    path = Path(file)
    bases = [Path(entry or ".").resolve() for entry in sys.path]
    inside = [path.relative_to(base) for base in bases if file and path.is_relative_to(base)]
    return str(min(inside, key=lambda shown: len(shown.parts), default=file))
