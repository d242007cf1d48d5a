"""The names that programs use without importing them, as graders of programs put the imports in front of an answer."""

from __future__ import annotations

import ast
import builtins
import importlib
import symtable
import warnings
from collections.abc import Iterable
from functools import lru_cache

# Where two modules have a name, the later one gives it.
STARS = (
    *("string", "re", "datetime", "fractions", "decimal", "collections", "heapq", "bisect", "copy", "math", "random"),
    *("statistics", "itertools", "functools", "operator", "io", "json", "abc", "enum", "dataclasses", "typing"),
)
OTHERS = (
    *("sys", "os", "time", "asyncio", "contextlib", "threading", "queue", "cmath", "calendar", "textwrap", "array"),
    *("struct", "types"),
)
MODULES = (*STARS, *OTHERS)
FROM_LATE = {"stdin": "sys", "stdout": "sys", "setrecursionlimit": "sys", "maxsize": "sys", "perf_counter": "time"}


def prelude(names: Iterable[str], *, has_numpy: bool = False) -> str:
    """The imports of those among some unbound names that are usual."""
    usual = _usual() | ({"np": "import numpy as np", "numpy": "import numpy"} if has_numpy else {})
    return "\n".join(usual[name] for name in sorted(names) if name in usual)


def unbound(source: str) -> set[str]:
    """The global names that code reads and makes nowhere, builtins aside; one of `FAULTS` for text that is no code."""
    with warnings.catch_warnings(action="ignore"):  # of the model's own escape sequences
        top = symtable.symtable(source, "code.py", "exec")
    read, made = set[str](), set[str]()
    tables = [top]
    while tables:
        table = tables.pop()
        tables += table.get_children()
        for symbol in table.get_symbols():
            if symbol.is_global() or table is top:
                (made if symbol.is_assigned() or symbol.is_imported() else read).add(symbol.get_name())
                if symbol.is_namespace():
                    made.add(symbol.get_name())
    return read - made - BUILTIN


def modules_read(source: str) -> set[str]:
    """The unbound names of code that are usual modules, read only for their attributes."""
    tree = ast.parse(source)
    of_attribute = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    bare = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and id(node) not in of_attribute}
    return (unbound(source) & {*MODULES}) - bare


FAULTS = (SyntaxError, ValueError, RecursionError, MemoryError)
BUILTIN = frozenset((*dir(builtins), "exit", "quit", "__file__", "__name__"))


@lru_cache(maxsize=1)
def _usual() -> dict[str, str]:
    """The import of each usual name."""
    found: dict[str, str] = {}
    for module in STARS:
        loaded = importlib.import_module(module)
        names = getattr(loaded, "__all__", None) or [name for name in dir(loaded) if not name.startswith("_")]
        found |= {name: f"from {module} import {name}" for name in names}
    found |= {name: f"from {module} import {name}" for name, module in FROM_LATE.items()}
    return found | {module: f"import {module}" for module in MODULES}
