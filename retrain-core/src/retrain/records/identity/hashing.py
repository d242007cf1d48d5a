"""Hashes the files of inputs and plugins within bounds, whatever they are, under names without their place."""

from __future__ import annotations

import glob
import importlib.util
import os
import stat
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from retrain.kernel.plugins.discover import normal_name
from retrain.kernel.plugins.first_party import own_distributions
from retrain.kernel.plugins.installed import versions_of
from retrain.kernel.registry import Plugins
from retrain.records.files import CHUNK, new_digest
from retrain.records.identity.inputs import is_local

# Larger files, and those beyond this total, are sampled: a start must not wait for a data set of 100 GB to be hashed.
SAMPLED_ABOVE = 2**30
BLOCKS, BLOCK_BYTES = 64, 2**16
COPIED_BYTES = 2**20  # a run keeps copies of files up to this size,
COPIED_TOTAL_BYTES = 2**22  # together up to this one
MAX_FILES = 10_000  # of one folder
# Larger files of a model folder, its weights, and of a distribution are sampled.
MODEL_WHOLE_BYTES = 2**24


@dataclass(frozen=True, slots=True, kw_only=True)
class HashedFile:
    """A file and its BLAKE2b hash.

    `name` is the same on every machine (a module's path below its import root, a data file as the configuration names
    it), `path` is where it was read. With `is_sampled` the hash covers the size and some blocks, and a data file's
    modification time counts too. `problem` says why there is no hash. `content` is kept for a copy.
    """

    name: str
    path: str
    size: int = 0
    hash: str = ""
    is_sampled: bool = False
    mtime_ns: int = 0
    problem: str = ""
    content: bytes = field(default=b"", repr=False)

    def as_data(self) -> dict[str, Any]:
        named = {key: getattr(self, key) for key in ("path", "size", "hash", "is_sampled", "mtime_ns", "problem")}
        return {key: value for key, value in named.items() if value}


@dataclass(slots=True)
class Budget:
    """The remaining bytes to hash completely, blocks to hash of larger files, and bytes to keep for copies."""

    whole: int = SAMPLED_ABOVE
    blocks: int = 64 * BLOCKS
    copies: int = COPIED_TOTAL_BYTES


def hash_file(
    name: str,
    path: str | Path,
    budget: Budget,
    *,
    sampled_above: int = SAMPLED_ABOVE,
    with_time: bool = True,
    is_kept: bool = True,
) -> HashedFile:
    """Hash a regular file, or say why it cannot be; never waits for a FIFO or a device.

    Beyond `sampled_above` bytes, or without budget, the hash covers the size and evenly spaced blocks, and `with_time`
    adds the modification time. `is_kept`: keep the content of a small file, for a copy.
    """
    place, name = str(path), _utf8(name)
    try:
        # O_NONBLOCK, because opening a FIFO would wait for its writer
        with open(place, "rb", buffering=0, opener=lambda each, flags: os.open(each, flags | os.O_NONBLOCK)) as stream:
            found = os.fstat(stream.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise OSError("not a regular file")
            size, digest, content = found.st_size, new_digest(), b""
            is_whole = size <= min(sampled_above, budget.whole)
            if not is_whole:
                blocks = min(BLOCKS, budget.blocks)
                budget.blocks -= blocks
                # The size counts, too: lines added at the end may fall between two blocks.
                digest.update(str(size).encode())
                last = max(size - BLOCK_BYTES, 0)  # blocks are evenly spaced from the first byte to the last
                for offset in dict.fromkeys(last * number // max(blocks - 1, 1) for number in range(blocks)):
                    digest.update(os.pread(stream.fileno(), BLOCK_BYTES, offset))
            while is_whole and (chunk := stream.read(CHUNK)):
                digest.update(chunk)
                budget.whole -= len(chunk)
                content = chunk
    except (OSError, ValueError) as error:
        problem = getattr(error, "strerror", None) or str(error) or type(error).__name__
        return HashedFile(name=name, path=_utf8(place), problem=problem)
    # `content` is the last chunk: of the file's size only where the file is a single one.
    is_kept = is_kept and is_whole and len(content) == size <= min(COPIED_BYTES, budget.copies)
    budget.copies -= size if is_kept else 0
    return HashedFile(
        name=name,
        path=_utf8(place),
        size=size,
        hash=digest.hexdigest(),
        is_sampled=not is_whole,
        mtime_ns=found.st_mtime_ns if with_time and not is_whole else 0,
        content=content if is_kept else b"",
    )


_hash_installed = partial(hash_file, sampled_above=MODEL_WHOLE_BYTES, with_time=False)


def _utf8(name: str) -> str:
    return name if name.isascii() else name.encode("utf-8", "backslashreplace").decode()


def files_below(folder: str | Path, *, without: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the files below a folder, sorted, without hidden ones, byte code and `without`; no links to folders."""
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__pycache__")))
        if without:
            folders[:] = [name for name in folders if os.path.realpath(os.path.join(parent, name)) not in without]
        for name in sorted(files):
            if not name.startswith(".") and not name.endswith((".pyc", ".pyo")):
                yield os.path.join(parent, name)


def code_name(written: str) -> str:
    return Path(written).as_posix() if written.endswith(".py") else f"{written.replace('.', '/')}.py"


def named_files(value: str, written: str, without: frozenset[str], budget: Budget) -> Iterator[HashedFile]:
    """Yield the file of a path, the files of a folder or a pattern, named from `written`; none for a remote source."""
    path = Path(value).expanduser()
    if not is_local(value):
        return  # its data are compared example by example: see `ExampleCheck`
    if path.is_dir():
        files = list(islice(files_below(path, without=without), MAX_FILES + 1))
        for file in files[:MAX_FILES]:
            yield hash_file(f"{written.rstrip('/')}/{os.path.relpath(file, path)}", file, budget)
        if len(files) > MAX_FILES:
            yield HashedFile(name=written, path=str(path), problem=f"only the first {MAX_FILES} files are hashed")
    elif path.exists() or not glob.has_magic(value):
        yield hash_file(written, path, budget)
    else:
        head, head_written = fixed_part(str(path)), fixed_part(written)
        for each in sorted(glob.glob(str(path), recursive=True)):
            if not os.path.isdir(each):
                name = each if value == written else os.path.join(head_written, os.path.relpath(each, head or "."))
                yield hash_file(name, Path(each), budget)


def fixed_part(pattern: str) -> str:
    """Return the folders of a pattern before its first wildcard."""
    parts = pattern.split(os.sep)
    first = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return os.sep.join(parts[:first]) or os.sep * pattern.startswith(os.sep)


def weights_below(folder: Path, budget: Budget, *, prefix: str) -> Iterator[HashedFile]:
    """Yield the files of a model or an adapter, large ones by size and blocks."""
    for file in files_below(folder) if folder.is_dir() else ():
        yield _hash_installed(f"{prefix}{os.path.relpath(file, folder)}", file, budget, is_kept=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFiles:
    """A plugin distribution: version, folder of its modules, files by path below it, only sources if it `is_ours`."""

    version: str
    is_ours: bool
    root: str
    files: tuple[HashedFile, ...]


def plugin_modules(plugins: Plugins) -> dict[str, set[str]]:
    """Return the top-level modules of every distribution whose plugin is loaded."""
    modules: dict[str, set[str]] = {}
    for name, _ in plugins.pluggy.list_name_plugin():
        distribution, separator, source = name.partition(":")
        if separator and source:
            modules.setdefault(distribution, set()).add(source.partition(":")[0].partition(".")[0])
    return modules


def plugin_files(modules: Mapping[str, set[str]], budget: Budget) -> dict[str, PluginFiles]:
    versions, found = versions_of(modules), {}
    for distribution, tops in sorted(modules.items()):
        is_ours = normal_name(distribution) in own_distributions()
        places = [located(top) for top in sorted(tops)]
        root = next((str(Path(place).parent) for place, _ in places if place), "")
        files = [
            _hash_installed(path.removeprefix(f"{root}{os.sep}"), path, budget, is_kept=not is_ours)
            for place, is_folder in places
            for path in (islice(files_below(place), MAX_FILES) if is_folder else [place] if place else [])
            if not is_ours or path.endswith(".py")
        ]
        version = versions.get(distribution, "")
        found[distribution] = PluginFiles(version=version, is_ours=is_ours, root=root, files=tuple(files))
    return found


def located(top: str) -> tuple[str, bool]:
    """Return the folder of a package, or the file of a module; empty without one."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return "", False
    folder = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    return folder or (spec.origin or "" if spec else ""), bool(folder)
