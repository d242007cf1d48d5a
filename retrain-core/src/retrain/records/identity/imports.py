"""Finds the modules of a project that a module imports, directly or not, by syntax; nothing is imported.

Statements inside functions count too.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.declared import PluginSpec

MAX_SOURCE_BYTES = 2**22  # what a larger source imports is not looked for
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # as a PluginSpec names its factory


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of the project: dotted name, file (empty for a namespace package), and the folder that holds it."""

    name: str
    file: str
    root: str
    is_package: bool


@dataclass(slots=True, kw_only=True)
class ImportGraph:
    """Follows imports from module to module, up to installed ones and the top-level names `foreign`."""

    foreign: frozenset[str] = frozenset()
    found: dict[str, Module] = field(default_factory=dict)
    _specs: dict[tuple[str, str], ModuleSpec | None] = field(default_factory=dict)

    def add(self, name: str) -> bool:
        """Add a module, its parent packages and all their imports; False when the project has no such module."""
        fresh: list[tuple[Module, str]] = []
        is_found = self._enter(name, "", fresh)
        self._follow(fresh if is_found else [])
        return is_found

    def add_file(self, file: Path) -> None:
        """Add a `.py` file that is not imported by name, and all its imports; its folder is searched first."""
        key = str(file)
        if key not in self.found:
            module = Module(name="", file=key, root=str(file.parent), is_package=False)
            self.found[key] = module
            self._follow([(module, str(file.parent))])

    def _follow(self, fresh: list[tuple[Module, str]]) -> None:
        while fresh:
            module, folder = fresh.pop()
            for name in imported_names(module):
                self._enter(name, folder, fresh)

    def _enter(self, name: str, folder: str, fresh: list[tuple[Module, str]]) -> bool:
        """Find a module with its parents, in `folder` first; add the new ones to `fresh`, to be followed."""
        parts, places = name.split("."), None
        if parts[0] in self.foreign or not name:
            return False
        for end in range(1, len(parts) + 1):
            full = ".".join(parts[:end])
            spec = self._spec(full, places, folder)
            if spec is None or (end == 1 and is_installed(_location(spec))):
                return False
            if full not in self.found:
                module = _module(full, spec)
                self.found[full] = module
                fresh.append((module, folder))
            places = spec.submodule_search_locations
            if places is None and end < len(parts):
                return False
        return True

    def _spec(self, full: str, places: Iterable[str] | None, folder: str) -> ModuleSpec | None:
        key = (full, folder)
        if key not in self._specs:
            self._specs[key] = _find(full, None if places is None else list(places), folder)
        return self._specs[key]


def _find(full: str, places: list[str] | None, folder: str) -> ModuleSpec | None:
    try:
        if places is not None:
            return PathFinder.find_spec(full, places)
        if "." in full:
            return None
        if folder and (spec := PathFinder.find_spec(full, [folder])) is not None:
            return spec
        return importlib.util.find_spec(full)
    except (ImportError, ValueError, AttributeError):
        return None


def _location(spec: ModuleSpec) -> str:
    """Return the file of a module, the folder of a namespace package; empty for a built-in module."""
    if spec.has_location and spec.origin:
        return spec.origin
    return next(iter(spec.submodule_search_locations or ()), "")


def _module(name: str, spec: ModuleSpec) -> Module:
    location, is_package = _location(spec), spec.submodule_search_locations is not None
    root = Path(location)
    for _ in range(len(name.split(".")) + (is_package and spec.has_location)):
        root = root.parent
    file = location if spec.has_location else ""
    return Module(name=name, file=file, root=str(root), is_package=is_package)


def is_installed(location: str) -> bool:
    """True for a file of Python or of an installed package, and for built-in modules."""
    return not location or location.startswith(_installed_folders())


@lru_cache(maxsize=1)
def _installed_folders() -> tuple[str, ...]:
    named: Mapping[str, str] = sysconfig.get_paths()
    folders = {named[key] for key in ("stdlib", "platstdlib", "purelib", "platlib")}
    folders |= {*site.getsitepackages(), site.getusersitepackages(), str(Path(os.__file__).parent)}
    folders |= {path for path in sys.path if path.endswith((".zip", "site-packages", "dist-packages"))}
    return tuple(f"{folder}{os.sep}" for folder in folders) + tuple(f for f in folders if f.endswith(".zip"))


def imported_names(module: Module) -> Iterator[str]:
    """Yield the absolute names of all modules that the text of a module may import; none if it cannot be read."""
    if not module.file.endswith((".py", ".pyw")):
        return
    try:
        with open_regular(Path(module.file)) as source:
            text = source.read(MAX_SOURCE_BYTES + 1)
        tree = ast.parse(text if len(text) <= MAX_SOURCE_BYTES else b"")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    has_specs = b"PluginSpec" in text
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and (base := _base(node, module)):
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Call) and _called(node) in ("import_module", "__import__") and node.args:
            name = getattr(node.args[0], "value", None)
            yield from [name] if isinstance(name, str) else []
        elif has_specs and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value.partition(":")[0]] if _FACTORY.fullmatch(node.value) else []


def _called(node: ast.Call) -> str:
    return getattr(node.func, "attr", "") or getattr(node.func, "id", "")


def _base(node: ast.ImportFrom, module: Module) -> str:
    """Return the package that a `from` names; empty for a relative one outside a package."""
    name = node.module or ""
    if not node.level:
        return name
    above = module.name.split(".")[: None if module.is_package else -1]
    kept = above[: max(len(above) - node.level + 1, 0)]
    return ".".join([*kept, *([name] if name else [])]) if kept else ""


def module_file(name: str) -> str:
    """Return the file of a module; empty without one. Neither it nor its parent packages are imported."""
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
    if isinstance(spec.factory, str):
        return module_file(spec.factory.partition(":")[0])
    target = spec.factory if hasattr(spec.factory, "__module__") else type(spec.factory)
    module = sys.modules.get(getattr(target, "__module__", None) or "")
    try:
        return inspect.getsourcefile(inspect.unwrap(spec.factory)) or ""  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return getattr(module, "__file__", None) or ""
