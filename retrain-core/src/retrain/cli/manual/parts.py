"""Generated section `plugins`: every installed part, kind by kind, with its parameters."""

from __future__ import annotations

from pydantic import BaseModel

from retrain.cli.manual import markdown
from retrain.kernel.config.keys import keys_of
from retrain.kernel.declared import TableTraits
from retrain.kernel.plugin_spec import Registered
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind
from retrain.run.check import registered_tables

# Where parts are named, for kinds that no config key declares.
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
        rows = [(_names(entry), entry.owner.distribution, entry.spec.summary) for entry in entries]
        sections += [f"### {kind.value}", f"Named in: {where.get(kind, '')}." if kind in where else ""]
        sections.append(markdown.table(("name", "distribution", "what it is"), rows))
        sections += [_params(entry) for entry in entries]
    return "\n\n".join(section for section in sections if section)


def naming_keys(plugins: Plugins) -> dict[Kind, str]:
    """The TOML keys that name parts, by kind."""
    found = dict(KEYS)
    for name, entry in registered_tables(plugins).items():
        for key in keys_of(name, entry.model, entry.traits):
            if key.names:
                others = [found[key.names]] if key.names in found else []
                found[key.names] = ", ".join([*others, f"`[{key.table}] {key.name}`"])
    return found


def _names(entry: Registered) -> str:
    also = f" ({', '.join(map(markdown.code, entry.spec.aliases))})" if entry.spec.aliases else ""
    return markdown.code(entry.spec.name) + also


def _params(entry: Registered) -> str:
    try:
        model = entry.spec.load_params()
    except Exception:  # a broken plugin; `retrain plugins` reports it
        return ""
    if model is None or not issubclass(model, BaseModel) or not model.model_fields:
        return ""
    rows = [
        (markdown.code(key.name), markdown.value(key.default), key.description)
        for key in keys_of(entry.spec.name, model, TableTraits())
    ]
    return f"Parameters of `{entry.spec.name}`:\n\n" + markdown.table(("parameter", "default", "meaning"), rows)
