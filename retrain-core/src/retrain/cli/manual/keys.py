"""Generated sections `keys`, `flags`, `metrics` and `commands`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from retrain.cli.manual import markdown
from retrain.cli.manual.json_schema import key_schemas
from retrain.kernel.config.keys import keys_of
from retrain.kernel.config.load import all_keys
from retrain.kernel.declared import Kind, MetricSpec
from retrain.kernel.hooks import PROJECT
from retrain.kernel.registry import Plugins
from retrain.run.tables import registered_tables

HOOK = f"{PROJECT}_describe_metrics"
LOOP = "retrain.observe.metrics.metric_names"
TRAIN = "train"
TRAIN_USAGE = "retrain [CONFIG] [--KEY VALUE]..."
RANGES = (("minimum", "≥ "), ("exclusiveMinimum", "> "), ("maximum", "≤ "), ("exclusiveMaximum", "< "))
WORDS = {"string": "text", "integer": "integer", "number": "number", "boolean": "boolean", "object": "table"}


def keys(plugins: Plugins, *only: str) -> str:
    """Every key, table by table: type and range, default, flag, meaning; of all tables, or `only` of these."""
    lines = []
    for name, entry in registered_tables(plugins).items():
        if only and name not in only:
            continue
        schemas = key_schemas(entry)
        rows = []
        for key in keys_of(name, entry.model, entry.traits):
            is_long = isinstance(key.default, list) and any(isinstance(value, dict) for value in key.default)
            # the tables are too long for a cell; `retrain explain --keys --json` shows them
            default = f"{len(key.default)} tables" if is_long else markdown.value(key.default)
            also = f" Also called {', '.join(map(markdown.code, key.aliases))}." if key.aliases else ""
            meaning = key.description + also + (f" **Not yet:** {key.pending}." if key.pending else "")
            rows.append((f"`{key.name}`", _type(schemas[key.name]), default, f"`--{key.flag}`", meaning))
        purpose = markdown.prose(entry.model.__doc__).split("\n\n")[0]
        lines += [f"### [{name}]", purpose, markdown.table(("key", "type", "default", "flag", "meaning"), rows)]
    return "\n\n".join(lines)


def flags(plugins: Plugins) -> str:
    found = sorted(all_keys(registered_tables(plugins)), key=lambda key: key.flag)
    return markdown.table(("flag", "key"), [(f"`--{key.flag}`", f"`[{key.table}] {key.name}`") for key in found])


def _type(schema: dict[str, Any]) -> str:
    """`integer ≥ 1`, `"a" | "b"`, `list of text`."""
    if "enum" in schema:
        return " | ".join(markdown.value(choice) for choice in schema["enum"])
    if "const" in schema:
        return markdown.value(schema["const"])
    if "anyOf" in schema:
        return " or ".join(_type(choice) for choice in schema["anyOf"] if choice.get("type") != "null")
    if schema.get("type") == "array":
        return f"list of {_type(schema.get('items', {})) or 'values'}"
    limits = [f"{sign}{schema[word]:g}" for word, sign in RANGES if word in schema]
    return " ".join([WORDS.get(schema.get("type", ""), "any"), ", ".join(limits)]).strip()


def metrics(plugins: Plugins) -> str:
    sections = []
    for owner, specs in described(plugins).items():
        distribution, _, module = owner.partition(":")
        sections.append("### The loop" if module == LOOP else f"### {distribution}, {markdown.code(module)}")
        if isinstance(specs, Exception):
            sections.append(f"Cannot be described: {type(specs).__name__}.")
        else:
            rows = [(markdown.code(spec.name), spec.unit, spec.meaning, spec.absent or "never") for spec in specs]
            sections.append(markdown.table(("field", "unit", "meaning", "absent"), rows))
    return "\n\n".join(sections)


def described(plugins: Plugins) -> dict[str, list[MetricSpec] | Exception]:
    """The fields of each plugin, or its error, by distribution and module; the loop's come first."""
    found: dict[str, list[MetricSpec] | Exception] = {}
    for implementation in getattr(plugins.pluggy.hook, HOOK).get_hookimpls():
        try:
            found[implementation.plugin_name] = list(implementation.function() or ())
        except Exception as error:  # one broken plugin must not break the page
            found[implementation.plugin_name] = error
    return dict(sorted(found.items(), key=lambda item: (not item[0].endswith(f":{LOOP}"), item[0])))


def commands(plugins: Plugins) -> str:
    """Usage, help and options of each command; `train`, the default, comes first."""
    sections = []
    entries = plugins.registered(Kind.COMMAND)
    for entry in sorted(entries, key=lambda entry: (entry.spec.name != TRAIN, entry.spec.name)):
        try:
            command: click.Command = entry.spec.load()
        except Exception as error:  # one broken plugin must not break the page
            sections += [f"### retrain {entry.spec.name}", f"Cannot be loaded: {type(error).__name__}."]
            continue
        for path, found in _walk(f"retrain {entry.spec.name}", command):
            also = "".join(f" Also called `{alias}`." for alias in entry.spec.aliases) if found is command else ""
            sections += _section(path, found, also)
    return "\n\n".join(sections)


def _walk(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    if isinstance(command, click.Group):
        for name, inner in sorted(command.commands.items()):
            yield from _walk(f"{path} {name}", inner)


def _section(path: str, command: click.Command, also: str) -> list[str]:
    is_train = path == f"retrain {TRAIN}"
    # click keeps the help option of the first context: without this, `-h` is lost for the rest of the process
    context = click.Context(command, info_name=path, help_option_names=["-h", "--help"])
    usage = TRAIN_USAGE if is_train else " ".join([path, *command.collect_usage_pieces(context)])
    text = "\n\n".join(part for part in (markdown.prose(command.help) + also, markdown.prose(command.epilog)) if part)
    lines = [f"### {path}", f"```text\n{usage}\n```", text]
    rows = []
    for option in command.params:
        if isinstance(option, click.Option) and not option.hidden:
            names = ", ".join(sorted(option.opts, key=len, reverse=True) + list(option.secondary_opts))
            metavar = "" if option.is_flag or option.count else f" {option.make_metavar(context)}"
            is_told = isinstance(option.default, str | int | float) and not (option.is_flag or option.multiple)
            default = markdown.value(option.default) if is_told else ""
            rows.append((markdown.code(names + metavar), default, option.help or ""))
    if rows:
        lines.append(markdown.table(("option", "default", "meaning"), rows))
    return [line for line in lines if line]
