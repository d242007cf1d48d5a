"""Recorded places of a configuration's paths, absolute and relative to the run's folder, to find them again."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.records.reading import table_of, tables_in
from retrain.records.record_names import PATHS


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A path of the configuration as a run recorded it; `relative` starts at `base`, the present folder of the run."""

    keys: tuple[str, ...] = ()
    sort: str = ""
    written: str = ""
    absolute: str
    relative: str
    base: str

    @property
    def candidates(self) -> list[str]:
        """Absolute paths to look at: next to the run, for inputs copied with it, then the original one."""
        # The run's folder may be a link, and relative paths start at either end of it.
        bases = dict.fromkeys((os.path.abspath(self.base), os.path.realpath(self.base)))
        near = (os.path.normpath(os.path.join(base, self.relative)) for base in bases)
        return list(dict.fromkeys((*near, self.absolute)))

    @property
    def existing(self) -> list[str]:
        return list(filter(is_there, self.candidates))

    @property
    def of_output(self) -> str:
        """The first candidate that exists, otherwise the one next to the run."""
        return (self.existing or self.candidates)[0]


def is_there(path: str) -> bool:
    """True if a path exists, or matches something as a pattern."""
    return os.path.exists(path) or any(glob.iglob(path, recursive=True))


def recorded_folder(manifest: Mapping[str, Any], run: str | Path) -> Place | None:
    """Return the folder in which the run was started; None if it is not recorded."""
    return _place(table_of(manifest, PATHS, "folder"), run)


def recorded_places(manifest: Mapping[str, Any], run: str | Path) -> list[Place]:
    """Return the places in a manifest; damaged entries are skipped."""
    found = (_place(each, run) for each in tables_in(table_of(manifest, PATHS).get("keys")))
    return [place for place in found if place and len(place.keys) > 1]


def _place(entry: Mapping[str, Any], run: str | Path) -> Place | None:
    texts = {name: entry.get(name, "") for name in ("sort", "written", "absolute", "relative")}
    keys = entry.get("keys", [])
    if not all(isinstance(text, str) and "\0" not in text for text in texts.values()) or not texts["absolute"]:
        return None
    return Place(keys=tuple(map(str, keys)) if isinstance(keys, list) else (), base=str(run), **texts)
