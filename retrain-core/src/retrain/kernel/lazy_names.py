"""Imports the public names of a module on first use, from the homes that its stub file (`.pyi`) lists.

A stub is read by type checkers as well, so the names are written once.
"""

from collections.abc import Callable
from importlib import import_module


def lazy_names(module: str, file: str) -> tuple[Callable[[str], object], list[str]]:
    """Return `__getattr__` and `__all__` of a module in a file."""
    # `open` and `split`, because importing `pathlib` and `re` takes milliseconds.
    with open(f"{file.removesuffix('.py')}.pyi", encoding="utf-8") as stub:
        lines = [line.split() for line in stub if line.startswith("from ")]
    homes = {name: home for _, home, _, name, _, _ in lines}  # `from home import name as name`

    def getattr_(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return getattr_, sorted(homes)
