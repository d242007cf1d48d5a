"""Hashes the files of an input under names that are the same wherever it lies."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from retrain.records.identity.hashing import MAX_FILES, Budget, HashedFile, files_below, hash_file
from retrain.records.identity.inputs import DATA_SUFFIXES

OWN_MODEL = ("model", "model")
MODEL_WHOLE_BYTES = 2**24  # larger files of a model folder, its weights, are sampled
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")


def code_name(written: str) -> str:
    """The name in an identity of a module, or of a `.py` file, that a configuration names."""
    return Path(written).as_posix() if written.endswith(".py") else f"{written.replace('.', '/')}.py"


def named_files(value: str, written: str, without: frozenset[str], budget: Budget) -> Iterator[HashedFile]:
    """The file of a path, those of a folder, or those that a pattern matches; none when it is no local path.

    Their names begin with `written`, the value as the run wrote it down. `without` are folders that are left out.
    """
    path = Path(value).expanduser()
    if not is_local(value):
        return  # what it gives is compared example by example: see `ExampleCheck`
    if path.is_dir():
        yield from _folder_files(written, path, without, budget)
    elif path.exists() or not glob.has_magic(value):
        yield hash_file(written, path, budget)
    else:
        head, head_written = fixed_part(str(path)), fixed_part(written)
        for each in sorted(glob.glob(str(path), recursive=True)):
            if not os.path.isdir(each):
                name = each if value == written else os.path.join(head_written, os.path.relpath(each, head or "."))
                yield hash_file(name, Path(each), budget)


def is_local(value: str) -> bool:
    """Whether a value of data is a path here, not a URL or the id of a data set."""
    is_id = HUB_ID.fullmatch(value) and not value.lower().endswith(DATA_SUFFIXES)
    return "://" not in value and not (is_id and not Path(value).expanduser().exists())


def fixed_part(pattern: str) -> str:
    """The folders of a pattern before its first wildcard."""
    parts = pattern.split(os.sep)
    first = next((number for number, part in enumerate(parts) if glob.has_magic(part)), len(parts))
    return os.sep.join(parts[:first]) or os.sep * pattern.startswith(os.sep)


def _folder_files(written: str, folder: Path, without: frozenset[str], budget: Budget) -> Iterator[HashedFile]:
    files = list(islice(files_below(folder, without=without), MAX_FILES + 1))
    for file in files[:MAX_FILES]:
        yield hash_file(f"{written.rstrip('/')}/{os.path.relpath(file, folder)}", file, budget)
    if len(files) > MAX_FILES:
        yield HashedFile(name=written, path=str(folder), problem=f"only the first {MAX_FILES} files are hashed")


def weights_below(folder: Path, budget: Budget, *, prefix: str) -> Iterator[HashedFile]:
    """The files of a model or an adapter, large ones by size and blocks."""
    for file in files_below(folder) if folder.is_dir() else ():
        name = f"{prefix}{os.path.relpath(file, folder)}"
        yield hash_file(name, file, budget, sampled_above=MODEL_WHOLE_BYTES, with_time=False, is_kept=False)
