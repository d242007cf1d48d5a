"""The files of installed plugin distributions, hashed one by one so that a changed one can be named."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from retrain.kernel.plugins.first_party import own_distributions
from retrain.kernel.plugins.installed import normal_name, versions_of
from retrain.kernel.registry import Plugins
from retrain.records.identity.hashing import MAX_FILES, Budget, HashedFile, files_below, hash_file

MAX_FILE_BYTES = 2**24  # larger files of a distribution are sampled


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginFiles:
    """A plugin distribution: its version, the folder of its modules, and their files by path below that folder.

    `is_ours`: one of the distributions that retrain itself consists of, of which only sources are hashed.
    """

    version: str
    is_ours: bool
    root: str
    files: tuple[HashedFile, ...]


def plugin_modules(plugins: Plugins) -> dict[str, set[str]]:
    """Top-level modules of every distribution whose plugin is loaded.

    Those that RETRAIN_PLUGINS or RETRAIN_BLOCK leave out are not loaded.
    """
    modules: dict[str, set[str]] = {}
    for name, _ in plugins.pluggy.list_name_plugin():
        distribution, separator, source = name.partition(":")
        if separator and source:
            modules.setdefault(distribution, set()).add(source.partition(":")[0].partition(".")[0])
    return modules


def plugin_files(modules: Mapping[str, set[str]], budget: Budget) -> dict[str, PluginFiles]:
    """Version and files of these distributions."""
    versions, found = versions_of(modules), {}
    for distribution, tops in sorted(modules.items()):
        is_ours = normal_name(distribution) in own_distributions()
        places = [located(top) for top in sorted(tops)]
        root = next((str(Path(place).parent) for place, _ in places if place), "")
        files = [
            hash_file(
                _name(path, root), path, budget, sampled_above=MAX_FILE_BYTES, with_time=False, is_kept=not is_ours
            )
            for place, is_folder in places
            for path in (islice(files_below(place), MAX_FILES) if is_folder else [place] if place else [])
            if not is_ours or path.endswith(".py")
        ]
        version = versions.get(distribution, "")
        found[distribution] = PluginFiles(version=version, is_ours=is_ours, root=root, files=tuple(files))
    return found


def located(top: str) -> tuple[str, bool]:
    """The folder of a package, or the file of a module; empty for none."""
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return "", False
    folder = next(iter(spec.submodule_search_locations or ()), "") if spec else ""
    return folder or (spec.origin or "" if spec else ""), bool(folder)


def _name(path: str, root: str) -> str:
    return path[len(root) + 1 :] if path.startswith(f"{root}{os.sep}") else path
