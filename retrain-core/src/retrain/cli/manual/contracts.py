"""Generated sections about plugins: `hooks` and `plugins`."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

from pydantic import BaseModel

from retrain.cli.manual import markdown
from retrain.kernel import hooks as hookspecs
from retrain.kernel.config.keys import keys_of
from retrain.kernel.declared import TableTraits
from retrain.kernel.registry import Plugins, Registered
from retrain.kernel.types import Kind
from retrain.run.tables import registered_tables


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
        for key in keys_of(name, entry.model, entry.traits):
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
        for key in keys_of(entry.spec.name, model, TableTraits())
    ]
    return f"Parameters of `{entry.spec.name}`:\n\n" + markdown.table(("parameter", "default", "meaning"), rows)
