"""Finds the files that an import of a module could read, without importing anything."""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

INSTALLED = ("site-packages", "dist-packages")


def candidate_modules(module: str, search_paths: Sequence[str]) -> list[str]:
    """The names under which a module is looked for: below each search path, then as given."""
    prefixes = [path.strip("./").replace("/", ".") for path in search_paths]
    return [*(f"{prefix}.{module}" for prefix in dict.fromkeys(prefixes) if prefix), module]


def candidate_files(module: str, search_paths: Sequence[str]) -> list[Path]:
    """The distinct files that could be `module`: all in the user's folders, and the first one that is installed.

    A module and a package of one name in one folder are two; one file that several paths reach is one. Folders behind
    the installed packages, where a resumed run finds copies of its code, only serve names that are nowhere else.
    """
    ends = [place for place, folder in enumerate(sys.path) if folder.endswith(INSTALLED)]
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    starts = [place for place, folder in enumerate(sys.path) if folder in library or folder.endswith(INSTALLED)]
    start, end = starts[0] if starts else len(sys.path), ends[-1] + 1 if ends else len(sys.path)
    here = [""] if str(Path.cwd()) not in sys.path[end:] else []
    found: dict[Path, Path] = {}
    for name in candidate_modules(module, search_paths):
        installed = next(_files(name, sys.path[start:end]), None)
        for file in [*_files(name, [*here, *sys.path[:start]]), *([installed] if installed else [])]:
            found.setdefault(file.resolve(), file)
    return list(found.values())


def _files(module: str, folders: Iterable[str]) -> Iterator[Path]:
    *packages, name = module.split(".")
    for folder in folders:
        below = Path(folder, *packages)
        yield from (file for file in (below / name / "__init__.py", below / f"{name}.py") if file.is_file())
