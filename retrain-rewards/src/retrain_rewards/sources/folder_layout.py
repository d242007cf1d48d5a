"""Finds the files of one split in a folder that is laid out as data sets of the Hugging Face hub are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from retrain.api import ConfigError, Problem
from retrain_rewards.sources.rows import SUFFIXES

TRAIN = "train"
SPLITS = {  # as the hub's own rules read file names
    **dict.fromkeys((TRAIN, "training"), TRAIN),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
MOST_NAMED = 10


def data_files(folder: Path) -> list[Path]:
    """The data files that lie in a folder itself, sorted by name."""
    return sorted(file for file in folder.iterdir() if file.is_file() and file.suffix.lower() in SUFFIXES)


def split_of(name: str) -> str:
    """The split that a file or folder is named after: `train` of `train-00000-of-00001.parquet`; empty for none."""
    return next((SPLITS[word] for word in re.split(r"[^a-z]+", name.lower()) if word in SPLITS), "")


def split_files(folder: Path, subset: str, split: str, *, where: str, may_lack_subset: bool = False) -> list[Path]:
    """The files of one subset and split, sorted; ConfigError says what the folder has instead.

    Files lie in the folder itself, in `data/`, in a folder named like the subset, or in one per split. A file belongs
    to the split that its name holds (`train-00000-of-00001.parquet`, `gsm8k_test.jsonl`), else to that of its folder,
    else to `train`, which an empty `split` means too. `may_lack_subset`: a folder without that sub-folder will do.
    """
    root = folder / subset
    if not root.is_dir():
        names = [entry.name for entry in _folders(folder)]
        if not may_lack_subset:
            raise _other(where, f"{str(folder)!r} has no subset {subset!r}", names, "subset")
        root = folder
    files, wanted = _files_below(root, where), SPLITS.get(split.lower(), split.lower()) or TRAIN
    inside = {file: "" if file.parent in (root, root / "data") else split_of(file.parent.name) for file in files}
    splits = {file: split_of(file.stem) or inside[file] for file in files}
    found = [file for file in files if splits[file] == wanted or wanted in re.split(r"[^\w]+", file.stem.lower())]
    found = found or [file for file in files if wanted == TRAIN and not splits[file]]
    if not found:
        raise _other(where, f"{str(folder)!r} has no split {wanted!r}", sorted({*splits.values()} - {""}), "split")
    return found


def _files_below(root: Path, where: str) -> list[Path]:
    """The data files of a folder itself, else of its `data/`, else of the folders of its splits or its only folder."""
    places = [place for place in (root, root / "data") if place.is_dir()]
    for place in places:
        if found := data_files(place):
            return found
    filled = {entry: found for place in places for entry in _folders(place) if (found := data_files(entry))}
    of_splits = [file for entry, found in filled.items() if split_of(entry.name) for file in found]
    if not filled:
        what, fix = f"folder {str(root)!r} holds no data file", f"put one there: {', '.join(SUFFIXES)}"
        raise ConfigError(Problem(where=where, what=what, fix=fix))
    if not of_splits and len(filled) > 1:
        raise _other(where, f"{str(root)!r} has several subsets", [entry.name for entry in filled], "subset")
    return of_splits or next(iter(filled.values()))


def _folders(folder: Path) -> list[Path]:
    return sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _other(where: str, what: str, names: Sequence[str], option: str) -> ConfigError:
    found = ", ".join(names[:MOST_NAMED]) + (", ..." if len(names) > MOST_NAMED else "") or "none"
    fix = f'name one that it has: [data] options = {{ {option} = "{names[0] if names else "NAME"}" }}'
    return ConfigError(Problem(where=where, what=what, why=f"found: {found}", fix=fix))
