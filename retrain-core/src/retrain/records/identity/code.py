"""The code of a project that a configuration names: its modules with their imports, and the variables that they read.

Both are found by syntax and nothing is imported; statements inside functions count too. A reward that reads an
environment variable changes with it, so values are kept as short hashes. If the code reads names that are not
literals, or the environment as a whole, every variable counts except for terminals and sessions.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from retrain.kernel.config.toml_file import open_regular
from retrain.kernel.declared import PluginSpec
from retrain.kernel.plugins.installed import versions_of
from retrain.records.identity.hashing import Budget, HashedFile, code_name, hash_file
from retrain.records.identity.inputs import NamedInput
from retrain.records.reading import read_regular
from retrain.text.secrets import is_secret_variable

MAX_SOURCE_BYTES = 2**22  # larger sources are not searched for imports
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")  # as a PluginSpec names its factory

ALL = "*"  # an entry that says that all variables are listed: one that is absent was not set
UNSET, SECRET = "not set", "set"
HASH_BYTES = 4  # enough to see a change, too few to find a value by its hash
READERS = frozenset({"environ", "environb", "getenv", "getenvb"})
METHODS = frozenset({"get", "pop", "setdefault", "__getitem__", "__contains__"})
OTHER_READERS = frozenset({"expandvars", "/proc/self/environ"})
MARK = re.compile(rb"environ|getenv|expandvars")
# Differ between terminals, sessions and runs of one campaign, whatever the code.
OF_THE_SESSION = re.compile(
    r"_|(?:OLD)?PWD|SHLVL|TERM.*|COLUMNS|LINES|COLORTERM|LS_COLORS|PS\d|TMUX.*|STY|WINDOWID|DISPLAY|WAYLAND_.*|XDG_.*"
    r"|SSH_.*|DBUS_.*|GPG_.*|VSCODE_.*|SLURM_.*|RAY_.*|PYTEST_.*|RETRAIN_.*|WANDB_.*|CUDA_VISIBLE_DEVICES|INVOCATION_ID"
    r"|JOURNAL_STREAM|HISTFILE|HOSTNAME|LOGNAME|USER|HOME|TMPDIR|MAIL|LESS.*|PAGER|EDITOR|VISUAL|.*_PID|.*_THREADS"
)


def project_code(
    inputs: Sequence[NamedInput], dotted: Sequence[str], modules: dict[str, set[str]], budget: Budget
) -> tuple[tuple[HashedFile, ...], dict[str, str]]:
    """Hash the project's modules that a configuration names, with their imports; return installed packages too."""
    graph = ImportGraph(foreign=frozenset(top for tops in modules.values() for top in tops))
    packages, names = dict[str, str](), dict[str, str]()  # names: of files, as the run recorded them
    for module in dotted:
        _add_module(module, graph, packages)
    for each in inputs:
        if each.sort == "package":
            _add_package(each.value, graph, modules, packages)
        elif each.sort == "code" and each.value.endswith(".py"):
            path = Path(each.value).expanduser()
            graph.add_file(path)
            names[str(path)] = code_name(each.written)
        elif each.sort == "code" and each.value.strip():
            _add_module(each.value, graph, packages)
            if each.value != each.written and each.value in graph.found:
                names[graph.found[each.value].file] = code_name(each.written)
    found = sorted((module for module in graph.found.values() if module.file), key=lambda module: module.file)
    files = (hash_file(Path(names.get(each.file, each.inside)).as_posix(), each.file, budget) for each in found)
    return tuple(files), dict(sorted(packages.items()))


def _add_module(name: str, graph: ImportGraph, packages: dict[str, str]) -> None:
    """Add a module of the project with its imports, or the version of the installed package that has it."""
    top = name.partition(".")[0]
    if not graph.add(name) and top not in graph.foreign and is_installed(module_file(top)):
        packages |= versions_of(dict.fromkeys((top, top.replace("_", "-"))))


def _add_package(value: str, graph: ImportGraph, modules: dict[str, set[str]], packages: dict[str, str]) -> None:
    """Add an environment's package `owner/name@version`, or the module of an agent `module:function`."""
    if ":" in value:
        _add_module(value.partition(":")[0], graph, packages)
        return
    name = value.rpartition("/")[2].partition("@")[0].replace("-", "_")
    for module in dict.fromkeys((name, name.lower())):
        if module.isidentifier() and not graph.add(module) and module_file(module):
            spelt = versions_of((module, module.replace("_", "-")))
            modules.setdefault(next(iter(spelt), module), set()).add(module)


@dataclass(frozen=True, slots=True, kw_only=True)
class Module:
    """A module of the project: dotted name, empty if it is not imported by name, and file, empty without one."""

    name: str
    file: str
    is_package: bool = False

    @property
    def parents(self) -> list[str]:
        """The names of the packages around its contents."""
        return self.name.split(".")[: None if self.is_package else -1]

    @property
    def inside(self) -> str:
        """The path of the module below its import root."""
        return os.path.join(*self.parents, os.path.basename(self.file)) if self.name else self.file


@dataclass(slots=True, kw_only=True)
class ImportGraph:
    """Follows imports from module to module, up to installed ones and the top-level names `foreign`."""

    foreign: frozenset[str] = frozenset()
    found: dict[str, Module] = field(default_factory=dict)

    def add(self, name: str) -> bool:
        """Add a module, its parent packages and all their imports; False when the project has no such module."""
        fresh: list[tuple[Module, str]] = []
        is_found = self._enter(name, "", fresh)
        self._follow(fresh if is_found else [])
        return is_found

    def add_file(self, file: Path) -> None:
        """Add a `.py` file that is not imported by name, and all its imports; its folder is searched first."""
        if (key := str(file)) not in self.found:
            self.found[key] = Module(name="", file=key)
            self._follow([(self.found[key], str(file.parent))])

    def _follow(self, fresh: list[tuple[Module, str]]) -> None:
        while fresh:
            module, folder = fresh.pop()
            for name in imported_names(module):
                self._enter(name, folder, fresh)

    def _enter(self, name: str, folder: str, fresh: list[tuple[Module, str]]) -> bool:
        """Find a module with its parents, in `folder` first; add the new ones to `fresh`, to be followed."""
        parts, places = name.split("."), list[str]() or None
        if parts[0] in self.foreign or not name:
            return False
        # from the top package down, since importing a module runs the `__init__.py` of each package around it
        for end in range(1, len(parts) + 1):
            full = ".".join(parts[:end])
            spec = _find(full, places, folder)
            if spec is None or (end == 1 and is_installed(_location(spec))):
                return False
            places = None if spec.submodule_search_locations is None else list(spec.submodule_search_locations)
            if full not in self.found:
                file = spec.origin if spec.has_location and spec.origin else ""
                self.found[full] = Module(name=full, file=file, is_package=places is not None)
                fresh.append((self.found[full], folder))
            if places is None and end < len(parts):
                return False
        return True


def _find(full: str, places: list[str] | None, folder: str) -> ModuleSpec | None:
    try:
        if places is not None:
            return PathFinder.find_spec(full, places)
        if "." in full:
            return None  # below a module that is no package
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


def is_installed(location: str) -> bool:
    """True for a file of Python or of an installed package, and for built-in modules."""
    return not location or location.startswith(_installed_folders())


@lru_cache(maxsize=1)
def _installed_folders() -> tuple[str, ...]:
    folders = {sysconfig.get_path(key) for key in ("stdlib", "platstdlib", "purelib", "platlib")}
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
    # A plugin names its parts as text, `module:function`, so that they load only in a run that uses them.
    has_specs = b"PluginSpec" in text
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom) and (base := _base(node, module)):
            yield base
            yield from (f"{base}.{each.name}" for each in node.names)
        elif isinstance(node, ast.Call) and node.args:
            called = getattr(node.func, "attr", "") or getattr(node.func, "id", "")
            name = getattr(node.args[0], "value", None)
            yield from [name] if isinstance(name, str) and called in ("import_module", "__import__") else []
        elif has_specs and isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from [node.value.partition(":")[0]] if _FACTORY.fullmatch(node.value) else []


def _base(node: ast.ImportFrom, module: Module) -> str:
    """Return the package that a `from` names; empty for a relative one outside a package."""
    name = node.module or ""
    if not node.level:
        return name
    kept = module.parents[: max(len(module.parents) - node.level + 1, 0)]
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


def source_of(file: HashedFile) -> bytes:
    """Return the source of a module; empty if it cannot be read."""
    if not file.content and file.size:
        with suppress(OSError):
            return read_regular(Path(file.path))
    return file.content


def variables_read(sources: Iterable[bytes], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return a hash of each variable that the sources read, by name; for a secret, only if it is set."""
    names: set[str] = set()
    for source in sources:
        if MARK.search(source):
            names.update(_names(source))
    if ALL in names:
        names |= {name for name in environ if not OF_THE_SESSION.fullmatch(name)}
    return {name: ALL if name == ALL else _shown(name, environ.get(name)) for name in sorted(names)}


def _shown(name: str, value: str | None) -> str:
    if value is None:
        return UNSET
    if is_secret_variable(name):
        return SECRET
    return blake2b(f"{name}={value}".encode("utf-8", "surrogateescape"), digest_size=HASH_BYTES).hexdigest()


def _names(source: bytes) -> Iterator[str]:
    """Yield the names that one module reads; `ALL` if they are unknown."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        yield ALL
        return
    parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            # `from os import getenv as read`: the reads themselves cannot be recognised.
            if any(each.name in READERS | OTHER_READERS and each.asname for each in node.names):
                yield ALL
        elif isinstance(node, ast.Constant):
            # `getattr(os, "environ")`, `open("/proc/self/environ")`
            if isinstance(node.value, str) and node.value in READERS | OTHER_READERS:
                yield ALL
        elif isinstance(node, ast.Attribute | ast.Name):
            name = node.attr if isinstance(node, ast.Attribute) else node.id
            if name in OTHER_READERS:
                yield ALL
            elif name in READERS and (read := _read(node, parents, constants)) is not None:
                yield read


def _read(node: ast.expr, parents: Mapping[ast.AST, ast.AST], constants: Mapping[str, object]) -> str | None:
    """Return the variable that an expression around `os.environ` or `os.getenv` reads; None where it only writes."""
    parent = parents.get(node)
    key: ast.expr | None = None
    if isinstance(parent, ast.Subscript) and parent.value is node:
        if not isinstance(parent.ctx, ast.Load):
            return None
        key = parent.slice
    elif isinstance(parent, ast.Compare) and isinstance(parent.ops[0], ast.In | ast.NotIn):
        key = parent.left
    elif isinstance(parent, ast.Call) and parent.func is node and parent.args:
        key = parent.args[0]
    elif isinstance(parent, ast.Attribute) and parent.attr in METHODS:
        call = parents.get(parent)
        key = call.args[0] if isinstance(call, ast.Call) and call.func is parent and call.args else None
    value = key.value if isinstance(key, ast.Constant) else constants.get(key.id) if isinstance(key, ast.Name) else None
    value = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return value if isinstance(value, str) else ALL
