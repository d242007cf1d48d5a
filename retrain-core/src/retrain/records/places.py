"""Recorded places of a configuration's paths, absolute and relative to the run's folder, to find them again."""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.records.reading import read_if_any, table_of, tables_in
from retrain.records.record_names import ADAPTERS, CAMPAIGN_FILE, RUN_FILE

ENTRY = "paths"  # of `run.json`, and of a campaign's manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A path of the configuration as a run recorded it; see `NamedInput` for `keys`, `sort` and `written`.

    `relative` starts at `base`, the present folder of the run.
    """

    keys: tuple[str, ...] = ()
    sort: str = ""
    written: str = ""
    absolute: str
    relative: str
    base: str

    @property
    def candidates(self) -> list[str]:
        """Absolute paths to look at: next to the run, which finds inputs copied with it, then the original one."""
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


def place_entry(absolute: str, run: str | Path) -> dict[str, str]:
    return {"absolute": absolute, "relative": os.path.relpath(absolute, os.path.abspath(run))}


def recorded_folder(manifest: Mapping[str, Any], run: str | Path) -> Place | None:
    """Return the folder in which the run was started; None if it is not recorded."""
    return _place(table_of(manifest, ENTRY, "folder"), run)


def recorded_places(manifest: Mapping[str, Any], run: str | Path) -> list[Place]:
    """Return the places in a manifest; damaged entries are skipped."""
    found = (_place(each, run) for each in tables_in(table_of(manifest, ENTRY).get("keys")))
    return [place for place in found if place and len(place.keys) > 1]


def adapters_of(run: Path, manifest: Mapping[str, Any]) -> Path:
    given = table_of(manifest, "config", "backend").get("adapter_path", "")
    if not given:
        return run / ADAPTERS
    places = recorded_places(manifest, run)
    known = (place.of_output for place in places if place.keys == ("backend", "adapter_path"))
    return Path(next(known, given)).expanduser()


def _place(entry: Mapping[str, Any], run: str | Path) -> Place | None:
    texts = {name: entry.get(name, "") for name in ("sort", "written", "absolute", "relative")}
    keys = entry.get("keys", [])
    if not all(isinstance(text, str) and "\0" not in text for text in texts.values()) or not texts["absolute"]:
        return None
    return Place(keys=tuple(map(str, keys)) if isinstance(keys, list) else (), base=str(run), **texts)


@dataclass(frozen=True, slots=True)
class Record:
    """The folder and manifest of a run or campaign that recorded places."""

    folder: Path
    manifest: Mapping[str, Any]

    @property
    def is_run(self) -> bool:
        return (self.folder / RUN_FILE).is_file()


def records_of(file: Path | None, resumed: str) -> list[Record]:
    """Return the run that is resumed, or that has `file`, then its campaign; empty unless places are recorded."""
    own = Path(resumed).expanduser() if resumed else file.parent if file else None
    folders = [own, *(path.absolute().parent.parent for path in (own, file) if path)]
    found = []
    for folder in filter(None, folders):
        manifests = (read_if_any(folder / name) for name in (RUN_FILE, CAMPAIGN_FILE))
        found += [Record(folder, manifest) for manifest in [next(filter(None, manifests), None)] if manifest]
    return found if any(record.manifest.get(ENTRY) for record in found) else []
