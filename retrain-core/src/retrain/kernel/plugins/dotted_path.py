"""Dotted paths in the TOML: the module that one refers to, below `search_paths` first, and its attribute."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from retrain.kernel.declared import Kind
from retrain.kernel.errors import LIBRARY_FOLDERS, PluginError, Problem
from retrain.kernel.registry import Owner


def load_dotted(name: str, kind: Kind, where: str, search_paths: Sequence[str]) -> tuple[Any, Owner] | None:
    """Import and return the object with its owner; None without such a module, PluginError for a faulty one."""
    module_name, attribute = _split(name)
    for candidate in candidate_modules(module_name, search_paths):
        try:
            module = importlib.import_module(candidate)
        except Exception as error:
            absent = error.name if isinstance(error, ModuleNotFoundError) else None
            # The candidate itself is missing, not a module that it imports.
            if absent is not None and f"{candidate}.".startswith(f"{absent}."):
                continue
            what = f"{kind} {name!r}: importing {candidate} failed with {type(error).__name__}: {error}"
            fix = f"make `python -c 'import {candidate}'` work in this folder"
            raise PluginError(Problem(code="plugin.import-failed", where=where, what=what, fix=fix)) from error
        if not hasattr(module, attribute):
            near = get_close_matches(attribute, [n for n in vars(module) if not n.startswith("_")], n=1)
            what = f"{kind} {name!r}: {getattr(module, '__file__', candidate)} has no {attribute!r}"
            fix = f"did you mean {near[0]!r}?" if near else "correct the name"
            raise PluginError(Problem(code="plugin.no-such-name", where=where, what=what, fix=fix))
        owner = Owner(distribution=getattr(module, "__file__", None) or candidate, source=candidate)
        return getattr(module, attribute), owner
    return None


def module_of(name: str, search_paths: Sequence[str]) -> str:
    """The module that a dotted path refers to, not imported; empty if it does not exist."""
    for candidate in candidate_modules(_split(name)[0], search_paths):
        try:
            if importlib.util.find_spec(candidate) is not None:
                return candidate
        # `find_spec` imports the parent packages of a dotted name, and they may not exist.
        except ModuleNotFoundError:
            continue
        # `resolve` imports it again and reports the error with its cause.
        except Exception:
            return candidate
    return ""


def ambiguity(what: str, module: str, *, where: str, search_paths: Sequence[str] = ()) -> Problem | None:
    """The problem with `what` when its module could be either of two files; None when one file at most is found."""
    files = candidate_files(module, search_paths)
    if len(files) < 2:
        return None
    what = f"{what} could come from {' or '.join(map(str, files))}"
    why, fix = "one file would silently hide the other", "rename or remove all but one, and name that one"
    return Problem(code="plugin.two-files", where=where, what=what, why=why, fix=fix)


def module_part(name: str) -> str:
    """The module of a dotted path; empty for any other name."""
    module, attribute = _split(name)
    is_dotted = bool(attribute) and all(part.isidentifier() for part in (*module.split("."), attribute))
    return module if is_dotted else ""


def _split(name: str) -> tuple[str, str]:
    # `module:attribute`, the form of entry points, is accepted as well.
    module, _, attribute = name.replace(":", ".").rpartition(".")
    return module, attribute if module else ""


def candidate_modules(module: str, search_paths: Sequence[str]) -> list[str]:
    """The names under which a module is looked for: below each search path, then as given."""
    prefixes = [path.strip("./").replace("/", ".") for path in search_paths]
    return [*(f"{prefix}.{module}" for prefix in dict.fromkeys(prefixes) if prefix), module]


def candidate_files(module: str, search_paths: Sequence[str]) -> list[Path]:
    """The distinct files that could be `module`: all in the user's folders, and the first one that is installed.

    A module and a package of one name in one folder are two; one file that several paths reach is one. Folders behind
    the installed packages, where a resumed run finds copies of its code, only serve names that are nowhere else.
    """
    # The library is one stretch of `sys.path`, from the standard library to the last folder of installed packages.
    installed_in = tuple(LIBRARY_FOLDERS)
    ends = [place for place, folder in enumerate(sys.path) if folder.endswith(installed_in)]
    library = {sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")}
    starts = [place for place, folder in enumerate(sys.path) if folder in library or folder.endswith(installed_in)]
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
