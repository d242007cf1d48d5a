"""Why a rerun is not the run: everything in which the two differ, the most likely cause first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.records.identity.changes import changes_between
from retrain.records.identity.copies import FOLDER
from retrain.records.manifest import LIBRARIES
from retrain.records.record_names import RUN_FILE
from retrain.records.run import Run
from retrain.text.secrets import HIDDEN
from retrain.tools.pack.contents import Contents, PackedRun
from retrain.tools.pack.inputs import with_moved
from retrain.tools.pack.lines import Divergence

# What changes a run, and what only rounds it otherwise, by how often it is the cause.
CHANGING = ("seed", "configuration", "data", "model", "code", "plugin", "python", "package", "hardware")
ROUNDING = ("hardware", "package", "python", "plugin", "code", "model", "configuration", "data", "seed")
LOOKED_AT = "seed, configuration, data, model, code, plugins, python, packages, hardware"
# Where a run writes and who watches it: a rerun sets these itself.
OF_THE_RERUN = ("logging", "resume", "campaign")
KEYS_OF_THE_RERUN = frozenset({"training.seed", "backend.adapter_path", "backend.throttle_dir"})
CALCULATING = tuple(name for name in LIBRARIES if name not in ("pydantic", "pluggy"))
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing in which the rerun is not what the pack says, and of which kind it is."""

    kind: str
    what: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.what}"


def ranked(found: list[Difference], first: Divergence | None) -> list[Difference]:
    """The most likely cause first: by kind, and by whether the first divergence is one of rounding."""
    order = ROUNDING if first is not None and first.is_rounding else CHANGING
    return sorted(found, key=lambda each: order.index(each.kind))


def differences(
    contents: Contents, packed: PackedRun, inputs: Path, run: Path, packages: Mapping[str, Mapping[str, str]]
) -> list[Difference]:
    """Every difference between a run of a pack and its rerun in `run`.

    `inputs` is the folder of the packed copies, `packages` what is installed where it was run again.
    """
    before, now = contents.record(f"{packed.place}/{RUN_FILE}"), Run(run).manifest
    identity = {**contents.record(packed.identity), FOLDER: str(inputs)}
    found = [*_settings(before, now, contents.moved)]
    for change in changes_between(_renamed(identity, contents), Run(run).identity):
        if str(change.kind) != "package":
            found.append(Difference(kind=str(change.kind), what=str(change)))
    if not any(each.kind in ("data", "configuration", "seed") for each in found):
        found += _examples(before, now)
    found += _packages(contents.packages, packages)
    if before.get("python") != now.get("python"):
        found.append(Difference(kind="python", what=_was(before.get("python"), now.get("python"))))
    return [*found, *_hardware(before, now)]


def _settings(before: Mapping[str, Any], now: Mapping[str, Any], moved: Mapping[str, str]) -> Iterator[Difference]:
    if before.get("seed") != now.get("seed"):
        yield Difference(kind="seed", what=_was(before.get("seed"), now.get("seed")))
    old, new = _flat(with_moved(before.get("config"), moved)), _flat(now.get("config"))
    for path in sorted({*old, *new}):
        values = old.get(path, _ABSENT), new.get(path, _ABSENT)
        is_own = path.partition(".")[0] in OF_THE_RERUN or path in KEYS_OF_THE_RERUN
        if values[0] != values[1] and not is_own:
            yield Difference(kind="configuration", what=f"{path} {_was(*values)}")
        elif HIDDEN in str(values[0]) and not is_own:
            yield Difference(kind="configuration", what=f"{path} holds a secret, which the pack hides")


def _flat(tables: Any, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in (tables if isinstance(tables, dict) else {}).items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return flat


def _renamed(identity: dict[str, Any], contents: Contents) -> dict[str, Any]:
    """The identity with data and code under the names that they have in the rerun's configuration."""
    names = {(file.kind, file.name): file.place for file in contents.files if file.kind != "model"}
    found = dict(identity)
    for kind in ("code", "data"):
        section = found.get(kind)
        if isinstance(section, dict) and isinstance(section.get("files"), dict) and contents.moved:
            files = {names.get((kind, name), name): file for name, file in section["files"].items()}
            found[kind] = {**section, "files": files}
    return found


def _examples(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    """Of a source that is no file: what it gives."""
    if before.get("examples") != now.get("examples"):
        yield Difference(kind="data", what="the data source gives other examples, or in another order")


def _packages(packed: Mapping[str, Mapping[str, str]], here: Mapping[str, Mapping[str, str]]) -> Iterator[Difference]:
    """Those that calculate first."""
    for name in sorted(packed, key=lambda each: (CALCULATING.index(each) if each in CALCULATING else 99, each)):
        old, new = packed[name], here.get(name, {})
        if old["version"] != new.get("version"):
            yield Difference(kind="package", what=f"{name} {_was(old['version'], new.get('version', _ABSENT))}")
        elif old["digest"] and new.get("digest") and old["digest"] != new["digest"]:
            what = f"{name} {old['version']} is another build: its files have other hashes"
            yield Difference(kind="package", what=what)


def _hardware(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    old, new = before.get("hardware") or {}, now.get("hardware") or {}
    for name in ("cpu", "machine", "cores", "threads", "system"):
        if old.get(name) != new.get(name):
            yield Difference(kind="hardware", what=f"{name} {_was(old.get(name), new.get(name))}")
    devices = [(record.get("devices") or {}).get("used") for record in (before, now)]
    if devices[0] != devices[1]:
        yield Difference(kind="hardware", what=f"devices {_was(*devices)}")


def _was(old: object, new: object) -> str:
    shown = ["absent" if each is _ABSENT else repr(each) if isinstance(each, str) else str(each) for each in (old, new)]
    return f"was {shown[0]} and is now {shown[1]}"
