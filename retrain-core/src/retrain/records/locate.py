"""Finds the file of a part, and the modules below the search paths; only the latter imports anything."""

from __future__ import annotations

import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from retrain.kernel.plugin_spec import PluginSpec

OK = "ok"


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedModule:
    """A module below a search path; `status` is `ok`, or `error: ` and what importing it raised."""

    module: str
    file: str
    status: str


def module_file(name: str) -> str:
    """The file of a module; empty when there is none. Neither it nor its parent packages are imported."""
    parts, spec, folders = name.split("."), None, None
    for end in range(1, len(parts) + 1):
        full = ".".join(parts[:end])
        try:
            spec = importlib.util.find_spec(full) if end == 1 else PathFinder.find_spec(full, folders)
        except (ImportError, ValueError):
            return ""
        if spec is None:
            return ""
        folders = spec.submodule_search_locations
    return spec.origin or "" if spec is not None else ""


def part_file(spec: PluginSpec) -> str:
    """The file of a registered part; empty when it is unknown."""
    if isinstance(spec.factory, str):
        return module_file(spec.factory.partition(":")[0])
    target = spec.factory if hasattr(spec.factory, "__module__") else type(spec.factory)
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    try:
        return inspect.getsourcefile(inspect.unwrap(spec.factory)) or ""  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return getattr(module, "__file__", None) or ""


def short_file(file: str) -> str:
    """A file relative to the import folder that holds it, or to this one."""
    path = Path(file)
    bases = [Path(entry or ".").resolve() for entry in sys.path]
    inside = [path.relative_to(base) for base in bases if file and path.is_relative_to(base)]
    return str(min(inside, key=lambda shown: len(shown.parts), default=file))


def searched_modules(search_paths: Sequence[str]) -> list[SearchedModule]:
    """Every module below the search paths whose name has no leading underscore, imported now.

    What a module prints goes to stderr, and what it raises becomes its status.
    """
    found: list[SearchedModule] = []
    for path in dict.fromkeys(prefix.strip("./").replace("/", ".") for prefix in search_paths):
        try:
            package = importlib.util.find_spec(path) if path else None
        except (ImportError, ValueError):
            continue
        folders = package.submodule_search_locations if package is not None else None
        for info in pkgutil.iter_modules(folders, f"{path}."):
            if folders and not info.name.rpartition(".")[2].startswith("_"):
                file = module_file(info.name)
                found.append(SearchedModule(module=info.name, file=file, status=_import_status(info.name)))
    return found


def _import_status(module: str) -> str:
    try:
        with redirect_stdout(sys.stderr):
            importlib.import_module(module)
    except (Exception, SystemExit) as error:  # whatever one of the user's files does, the others are listed too
        return f"error: {type(error).__name__}: {error}"
    return OK
