"""Generated section `api`: every public name that plugins and scripts may import, from its signature and docstring."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any

from retrain.cli.manual import markdown
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins

MODULES = ("retrain.api", "retrain.advantages", "retrain.testing", "retrain")  # the last one for scripts
ALIASES = (
    "retrain.kernel.types",
    "retrain.kernel.contracts.backend",
)  # define the type aliases


def api(plugins: Plugins, module: str) -> str:
    """Every public name of a module, sorted."""
    if module not in MODULES:
        raise ConfigError(Problem(what=f"{module!r} is not public", fix=f"use one of: {', '.join(MODULES)}"))
    content = importlib.import_module(module)
    return "\n\n".join(_entry(name, getattr(content, name)) for name in sorted(content.__all__, key=str.lower))


def described(name: str) -> str:
    """The entry of one name of `retrain.api` or `retrain.advantages`."""
    for module in MODULES[:2]:
        content = importlib.import_module(module)
        if name in content.__all__:
            return _entry(name, getattr(content, name))
    raise ConfigError(Problem(what=f"{name!r} is not public", fix="use a name of retrain.api"))


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


def _entry(name: str, value: Any) -> str:
    lines = [f"### {markdown.anchor(name)}"]
    if inspect.isclass(value) and value.__name__ != name:
        lines.append(f"The former name of {markdown.code(value.__name__)}, kept for plugins that use it.")
    elif inspect.isclass(value):
        lines += [f"```python\n{_class_line(name, value)}\n```", markdown.prose(_own_doc(value)), *_members(value)]
    elif inspect.isfunction(value):
        lines += [f"```python\ndef {name}{signature(value)}\n```", markdown.prose(value.__doc__)]
    elif written := _alias(name):
        lines.append(f"```python\n{name} = {written}\n```")
    else:
        lines += [
            f"```python\n{name}: {type(value).__name__}\n```",
            markdown.prose(type(value).__doc__).split("\n\n")[0],
        ]
    return "\n\n".join(line for line in lines if line)


def _alias(name: str) -> str:
    """A type alias as in the source: its runtime text differs between versions of numpy and Python."""
    for module in ALIASES:
        found = re.search(
            rf"^{name} = (.+?)(?:  #.*)?$", inspect.getsource(importlib.import_module(module)), re.MULTILINE
        )
        if found:
            return found[1]
    return ""


def _class_line(name: str, value: type) -> str:
    if dataclasses.is_dataclass(value):
        fields = ",\n    ".join(_field(field) for field in dataclasses.fields(value))
        return f"{name}(\n    {fields},\n)"
    if issubclass(value, enum.Enum):
        return f"class {name}: " + ", ".join(repr(getattr(member, "value", member)) for member in value)
    base = next((base.__name__ for base in value.__bases__ if base is not object), "")
    return f"class {name}({base})" if base else f"class {name}"


def _field(field: dataclasses.Field[Any]) -> str:
    kind = field.type if isinstance(field.type, str) else getattr(field.type, "__name__", str(field.type))
    if field.default is not dataclasses.MISSING:
        return f"{field.name}: {kind} = {_shown(field.default)}"
    return f"{field.name}: {kind}" + ("" if field.default_factory is dataclasses.MISSING else " = ...")


def _own_doc(value: type) -> str:
    """The docstring in the source, not the one that dataclass or Enum generates."""
    text = value.__doc__ or ""
    return "" if text.startswith(f"{value.__name__}(") else text


def _members(value: type) -> Iterator[str]:
    """Methods and properties that have a docstring, in source order."""
    for name, member in vars(value).items():
        if name.startswith("_"):
            continue
        inner = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not inspect.isfunction(inner) or not inner.__doc__:
            continue
        call = "" if isinstance(member, property) else signature(inner)
        yield f"`{name}{call}`\n:   " + markdown.prose(inner.__doc__).replace("\n", "\n    ")


def _shown(default: Any) -> str:
    """A default as in the source; `...` for a function."""
    if isinstance(default, enum.Enum):
        return f"{type(default).__name__}.{default.name}"
    return "..." if callable(default) else repr(default)
