"""Generated sections of the manual: `keys`, `flags`, `metrics`, `commands`, `hooks` and `plugins`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import click
from pydantic import BaseModel

from retrain.cli.manual import markdown
from retrain.cli.manual.json_schema import key_schemas
from retrain.kernel import hooks as hookspecs
from retrain.kernel.config.keys import keys_of
from retrain.kernel.config.load import all_keys
from retrain.kernel.declared import Kind, MetricSpec
from retrain.kernel.hooks import PROJECT
from retrain.kernel.registry import Plugins, Registered
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
        for key in keys_of(name, entry.model, entry.traits.flag_prefix):
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


# About plugins.


def hooks(plugins: Plugins) -> str:
    """Every hook in life-cycle order, with its signature and docstring."""
    specs = (value for name, value in vars(hookspecs).items() if name.startswith(f"{hookspecs.PROJECT}_"))
    return "\n\n".join(described_function(spec.__name__, spec) for spec in specs if isinstance(spec, FunctionType))


def described_function(name: str, function: Callable[..., Any]) -> str:
    written = f"```python\ndef {name}{signature(function)}\n```"
    return "\n\n".join([f"### {markdown.anchor(name)}", written, markdown.prose(function.__doc__)])


def signature(function: Callable[..., Any]) -> str:
    """`(rewards_G: Numbers, *, eps: float = 1e-06) -> Floats`: annotations as in the source, without `self`."""
    found = inspect.signature(function)
    parameters = [p.replace(annotation=_text(p.annotation)) for name, p in found.parameters.items() if name != "self"]
    return str(found.replace(parameters=parameters, return_annotation=_text(found.return_annotation)))


class _Text(str):
    """An annotation that is stored as text, shown without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _text(annotation: Any) -> Any:
    return _Text(annotation) if isinstance(annotation, str) else annotation


# The places that name parts, for kinds that no config key declares.
KEYS = {
    Kind.CONTROLLER: "named by a `TransformSpec`",
    Kind.CONFIG_TABLE: "the table itself",
    Kind.COMMAND: "`retrain NAME`",
    Kind.TEMPLATE: "`retrain init --template NAME`",
}


def parts(plugins: Plugins, *only: str) -> str:
    """One table of parts per kind: name, distribution, summary; then the parameters of parts that take any.

    `only` limits it to these kinds, with hyphens in their names: `data-source`.
    """
    where = naming_keys(plugins)
    sections = []
    for kind in Kind:
        entries = plugins.registered(kind)
        if not entries or (only and kind.value.replace(" ", "-") not in only):
            continue
        rows = []
        for spec, owner in ((entry.spec, entry.owner) for entry in entries):
            also = f" ({', '.join(map(markdown.code, spec.aliases))})" if spec.aliases else ""
            rows.append((markdown.code(spec.name) + also, owner.distribution, spec.summary))
        sections += [f"### {kind.value}", f"Named in: {where.get(kind, '')}." if kind in where else ""]
        sections.append(markdown.table(("name", "distribution", "summary"), rows))
        sections += [_params(entry) for entry in entries]
    return "\n\n".join(section for section in sections if section)


def naming_keys(plugins: Plugins) -> dict[Kind, str]:
    """The TOML keys that name parts, by kind."""
    found = dict(KEYS)
    for name, entry in registered_tables(plugins).items():
        for key in keys_of(name, entry.model, entry.traits.flag_prefix):
            if key.names:
                others = [found[key.names]] if key.names in found else []
                found[key.names] = ", ".join([*others, f"`[{key.table}] {key.name}`"])
    return found


def _params(entry: Registered) -> str:
    try:
        model = entry.spec.load_params()
    except Exception:  # a broken plugin; `retrain plugins` reports it
        return ""
    if model is None or not issubclass(model, BaseModel) or not model.model_fields:
        return ""
    rows = [
        (markdown.code(key.name), markdown.value(key.default), key.description)
        for key in keys_of(entry.spec.name, model)
    ]
    return f"Parameters of `{entry.spec.name}`:\n\n" + markdown.table(("parameter", "default", "meaning"), rows)
