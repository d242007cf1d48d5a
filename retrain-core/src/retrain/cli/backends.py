"""`retrain plugins --kind backend`: capabilities, options and installation state of each backend."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from pydantic import BaseModel

from retrain.credit.configured_loss import capability_fields
from retrain.kernel.declared import Capabilities, Kind
from retrain.kernel.plugin_spec import Registered
from retrain.kernel.plugins.first_party import install_line, promised_names, provider
from retrain.kernel.registry import Plugins
from retrain.records.identity.imports import part_file
from retrain.run.packages import required_packages
from retrain.text.terminal_text import printable

RANGE = {  # keywords of JSON Schema, and how they are shown
    "minimum": "at least",
    "exclusiveMinimum": "above",
    "maximum": "at most",
    "exclusiveMaximum": "below",
    "minLength": "length at least",
    "maxLength": "length at most",
    "minItems": "entries at least",
}


def backends(plugins: Plugins) -> list[dict[str, Any]]:
    """Every registered backend, as plain data."""
    return [_row(entry, plugins) for entry in plugins.registered(Kind.BACKEND)]


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
    except Exception as error:  # one broken plugin must not hide the others
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
    """The alternative schemas of a value: one, or those of a union."""
    forms: list[dict[str, Any]] = found.get("anyOf", [found])
    return forms


def backend_lines(content: dict[str, Any]) -> Iterator[str]:
    """Each backend with its capabilities and options, then those that are not installed."""
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
