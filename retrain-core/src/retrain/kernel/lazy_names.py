"""Imports the public names of a module on first use, from the homes that its stub file (`.pyi`) lists.

A stub is read by type checkers as well, so the names are written once.
"""

import re
from collections.abc import Callable
from importlib import import_module
from pathlib import Path


def lazy_names(module: str, file: str) -> tuple[Callable[[str], object], list[str]]:
    """Return `__getattr__` and `__all__` of a module in a file."""
    stub = Path(file).with_suffix(".pyi").read_text(encoding="utf-8")
    homes = {name: home for home, name in re.findall(r"^from (\S+) import (\w+) as \2$", stub, re.MULTILINE)}

    def getattr_(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return getattr_, sorted(homes)
