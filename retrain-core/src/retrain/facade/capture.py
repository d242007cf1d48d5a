"""Writes a plain function as a module that other processes can import, with everything that its source refers to.

A function of an importable module is only named. One of a notebook or a script is copied with the imports, constants
and functions that it uses; any other reference cannot be captured, and is refused by name.
"""

from __future__ import annotations

import ast
import builtins
import dis
import inspect
import math
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from importlib.machinery import ModuleSpec
from types import CodeType, FunctionType, ModuleType
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.text.secrets import hide_text, redacted

ANNOTATIONS = __import__("__future__").annotations.compiler_flag
KEYS = {
    "advantage": "algorithm.advantage_mode",
    "transform": "algorithm.transform_mode",
    "uncertainty": "algorithm.uncertainty_kind",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A function by its module; `source` is the text of a new module, empty for an existing one."""

    module: str
    name: str
    source: str = ""

    @property
    def path(self) -> str:
        return f"{self.module}.{self.name}"


def capture(function: Callable[..., Any], argument: str, *, companion: str = "") -> Captured:
    """Return the module of `function`; ConfigError names a reference that cannot be captured.

    `argument` names it in messages. A function called `companion` in the same place comes with it. The name of a copied
    module ends in a hash of its text, so that two versions never meet.
    """
    if not isinstance(inspect.unwrap(function), FunctionType):
        what = f"a {type(function).__name__} is not a plain function"
        fix = "pass a function that `def` made; name anything else in the configuration"
        raise _refused(argument, code="plugin.not-a-function", what=what, fix=fix)
    plain: FunctionType = inspect.unwrap(function)
    if found := _importable(function, function.__name__):
        return Captured(module=found, name=function.__name__)
    text = _Text(argument)
    text.add_function(plain.__name__, function)
    other = plain.__globals__.get(companion)
    if isinstance(other, FunctionType) and other.__module__ == plain.__module__ and other is not function:
        text.add_function(companion, other)
    source = text.module(f"{plain.__name__}, a copy of the function in retrain.train({argument}=...)")
    if hide_text(redacted(source)) != source:
        what = f"{plain.__name__} holds a secret that the copy in the run folder would make public"
        fix = "read it from an environment variable inside the function"
        raise _refused(argument, code="plugin.holds-secret", what=what, fix=fix)
    digest = blake2b(source.encode(), digest_size=4).hexdigest()
    return Captured(module=f"{plain.__name__}_{digest}", name=plain.__name__, source=source)


@dataclass(slots=True)
class _Text:
    argument: str
    imports: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    functions: dict[str, str] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    future: bool = False

    def add_function(self, name: str, function: Callable[..., Any]) -> None:
        """Add a function after everything that its source, with its decorators, refers to."""
        self.values[name] = function
        plain: FunctionType = inspect.unwrap(function)
        source, code = self._source_of(name, plain, is_decorated=plain is not function)
        self.future |= bool(plain.__code__.co_flags & ANNOTATIONS)
        closed = inspect.getclosurevars(plain).nonlocals
        loaded, assigned = _global_names(code)
        if assigned:
            what = f"{name} assigns the global {assigned[0]!r}, and every scoring process has a separate copy"
            fix = "return the result, or keep it in an object of a module"
            raise _refused(self.argument, code="plugin.assigns-global", what=what, fix=fix)
        for used in sorted(loaded - {name}):
            if used in closed or used in plain.__globals__:
                self._add(used, closed[used] if used in closed else plain.__globals__[used], name)
            elif not hasattr(builtins, used):
                what, fix = f"{name} uses an undefined {used!r}", "define or import it first"
                raise _refused(self.argument, code="plugin.undefined-name", what=what, fix=fix)
        self.functions[name] = source

    def module(self, title: str) -> str:
        head = [f'"""{title}."""', *(["from __future__ import annotations"] if self.future else [])]
        parts = ["\n".join(head), "\n".join(sorted(self.imports.values())), "\n".join(self.constants.values())]
        return "\n\n".join(filter(None, parts)) + "".join(f"\n\n\n{text}" for text in self.functions.values()) + "\n"

    def _add(self, name: str, value: Any, user: str) -> None:
        if name in self.values:
            if self.values[name] is not value:
                what = f"{name!r} names two different objects in the functions passed"
                raise _refused(self.argument, code="plugin.name-twice", what=what, fix=f"rename one {name!r}")
            return
        own = getattr(value, "__name__", name)
        is_plain = callable(value) and isinstance(inspect.unwrap(value), FunctionType) and own == name
        if is_plain and not _importable(value, name):
            return self.add_function(name, value)
        self.values[name] = value
        if isinstance(value, ModuleType) and _is_on_path(value):
            self.imports[name] = f"import {value.__name__} as {name}" if value.__name__ != name else f"import {name}"
        elif (text := _literal(value)) is not None:
            self.constants[name] = f"{name} = {text}"
        elif isinstance(value, re.Pattern) and (pattern := _literal(value.pattern)):
            # Without an import line: in the copy the name `re` may mean something else.
            self.constants[name] = f'{name} = __import__("re").compile({pattern}, {value.flags})'
        elif module := _importable(value, own):
            self.imports[name] = f"from {module} import {own}" + (f" as {name}" if own != name else "")
        else:
            what = f"{user} uses {name!r}, an object of type {type(value).__name__}"
            fix = "use only imports, constants and functions, or put it into a .py file and import it from there"
            raise _refused(self.argument, code="plugin.uncopyable-object", what=what, fix=fix)

    def _source_of(self, name: str, function: FunctionType, *, is_decorated: bool) -> tuple[str, CodeType]:
        """Return the text of a function's `def`, and the code of a module that contains only this `def`."""
        if function.__name__ == "<lambda>":
            what, fix = "a lambda has no name to import it by", "write it as a function with `def`"
            raise _refused(self.argument, code="plugin.lambda", what=what, fix=fix)
        try:
            source = textwrap.dedent(inspect.getsource(function)).rstrip()
            tree = ast.parse(source).body
        except (OSError, TypeError, SyntaxError) as error:
            what = f"the source of {name} cannot be read: {str(error).split(chr(10))[0]}"
            fix = "define it in a notebook or a script, or put it into a .py file and import it from there"
            raise _refused(self.argument, code="plugin.source-unreadable", what=what, fix=fix) from error
        if len(tree) != 1 or not isinstance(tree[0], ast.FunctionDef | ast.AsyncFunctionDef) or tree[0].name != name:
            what, fix = f"the source of {name} is not one `def {name}`", "put it into a .py file and import it"
            raise _refused(self.argument, code="plugin.not-one-def", what=what, fix=fix)
        flags = function.__code__.co_flags & ANNOTATIONS
        code = compile(source, f"<{name}>", "exec", flags=flags, dont_inherit=True)
        own = next(each for each in code.co_consts if isinstance(each, CodeType) and each.co_name == name)
        is_changed = not function.__code__.co_freevars and _words(own) != _words(function.__code__)
        if is_changed or (is_decorated and not tree[0].decorator_list):
            what = f"the source of {name} differs from the running function: it was edited since, or has a decorator"
            fix = "define the function again, without the decorator"
            raise _refused(self.argument, code="plugin.source-changed", what=what, fix=fix)
        return source, code


def _refused(argument: str, *, code: str, what: str, fix: str) -> ConfigError:
    return ConfigError(Problem(code=code, where=f"retrain.train({argument}=...)", what=what, fix=fix))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield from _codes(each)


def _global_names(code: CodeType) -> tuple[set[str], list[str]]:
    """Return the names that a module with only this code would have to define, and the globals it assigns."""
    steps = [(each, step.opname, step.argval) for each in _codes(code) for step in dis.get_instructions(each)]
    loaded = {name for each, op, name in steps if op == "LOAD_NAME" and not _defines(each, name)}
    loaded |= {name for _, op, name in steps if op == "LOAD_GLOBAL"}
    return loaded, [name for _, op, name in steps if op in ("STORE_GLOBAL", "DELETE_GLOBAL")]


def _defines(code: CodeType, name: str) -> bool:
    """True if the body of a class assigns this name itself."""
    return name in ("__name__", "__module__", "__qualname__") or any(
        step.opname == "STORE_NAME" and step.argval == name for step in dis.get_instructions(code)
    )


def _words(code: CodeType) -> list[tuple[Any, ...]]:
    """Return names and constants of the code; the instructions also depend on the imports of a module."""
    return [
        (each.co_names, each.co_varnames, [repr(const) for const in each.co_consts if not isinstance(const, CodeType)])
        for each in _codes(code)
    ]


def _importable(value: Any, name: str) -> str:
    """Return the module from which any process can import this value by `name`, empty if there is no such one."""
    module = sys.modules.get(getattr(value, "__module__", None) or "")
    found = module is not None and vars(module).get(name) is value and name.isidentifier()
    return module.__name__ if found and module is not None and _is_on_path(module) else ""


def _is_on_path(module: ModuleType) -> bool:
    """True if a process with the same import path finds this module by its name."""
    parts, folders, spec = module.__name__.split("."), None, None
    if module.__name__ == "__main__" or not all(part.isidentifier() for part in parts):
        return False
    if module.__name__ in sys.builtin_module_names or parts[0] in sys.stdlib_module_names:
        return True
    for end in range(1, len(parts) + 1):
        spec = _found(".".join(parts[:end]), folders)
        if spec is None:
            return False
        folders = spec.submodule_search_locations
    return spec is not None and spec.origin in (None, getattr(module, "__file__", None))


def _found(name: str, folders: Any) -> ModuleSpec | None:
    """Find a spec as `importlib.util.find_spec` does, but ignore modules that only this process has imported."""
    specs = (finder.find_spec(name, folders) for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return next(filter(None, specs), None)


def _literal(value: Any) -> str | None:
    if value is None or type(value) in (bool, int, str, bytes):
        return repr(value)
    if type(value) is float:
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    if type(value) is dict:
        pairs = [(_literal(key), _literal(item)) for key, item in value.items()]
        known = all(key is not None and item is not None for key, item in pairs)
        return "{" + ", ".join(f"{key}: {item}" for key, item in pairs) + "}" if known else None
    if type(value) in (list, tuple, set, frozenset):
        items = [_literal(item) for item in (value if isinstance(value, list | tuple) else sorted(value, key=repr))]
        if any(item is None for item in items):
            return None
        inner = ", ".join(map(str, items))
        plain = f"({inner},)" if type(value) is tuple and items else f"[{inner}]"
        return plain if type(value) is list or (type(value) is tuple and items) else f"{type(value).__name__}({plain})"
    return None


def settings_of(given: Mapping[str, Callable[..., Any] | None]) -> tuple[dict[str, Any], list[Captured]]:
    values: dict[str, Any] = {}
    captured = []
    for argument, function in given.items():
        if function is None:
            continue
        one = capture(function, argument, companion="gold" if argument == "reward" else "")
        captured.append(one)
        if argument == "reward":
            values |= {"reward.type": "custom", "reward.custom_module": one.module, "reward.custom_function": one.name}
        else:
            values |= {KEYS[argument]: one.path}
    return values, captured
