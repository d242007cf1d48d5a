"""What a pack's manifest says, checked: nothing in it can name a place outside the pack, or an option of pip."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from retrain.kernel.config.toml_file import parse_toml
from retrain.records.reading import parse_record
from retrain.records.record_names import CONFIG_FILE, METRICS, RUN_FILE
from retrain.tools.pack.archive import Opened, is_safe, refusal, refused
from retrain.tools.pack.lines import Line

_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
_VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+!-]*")
_WHEEL = re.compile(r"wheels/[A-Za-z0-9_.+!-]+\.whl")
_DIGEST = re.compile(r"[0-9a-f]{32}|")  # empty for a package whose installer recorded no hashes
_THREADS = re.compile(r"[0-9]{1,4}")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedFile:
    """A file of code, data or a model: its name in the configuration, and where a rerun lays it.

    `member` is empty for one that was left out; `hash` is BLAKE2b, 16 bytes.
    """

    kind: str
    name: str
    place: str
    member: str
    hash: str
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWheel:
    """A plugin distribution as a wheel."""

    name: str
    version: str
    member: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRun:
    """A run: `name` is its folder in a campaign, empty for a single run; `place` that of its records in the pack."""

    name: str
    place: str
    condition: str
    seed: int | None
    steps: int
    identity: str
    weights: Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contents:
    """A pack. `packages` are versions and digests of the packages that its plugins need, by name."""

    opened: Opened
    name: str
    is_campaign: bool
    python: str
    threads: Mapping[str, str]
    files: tuple[PlacedFile, ...]
    wheels: tuple[PackedWheel, ...]
    packages: Mapping[str, Mapping[str, str]]
    runs: tuple[PackedRun, ...]
    moved: Mapping[str, str]
    margin: float | None
    verdict: Mapping[str, Any] | None

    def config(self) -> dict[str, Any]:
        """The resolved configuration."""
        return parse_toml(self.opened.read(CONFIG_FILE).decode("utf-8"), f"{self.opened.file}:{CONFIG_FILE}")

    def lines(self, run: PackedRun) -> list[Line]:
        """What a run recorded, line by line."""
        text = self.opened.read(f"{run.place}/metrics.jsonl")
        return [parse_record(line) for line in text.splitlines() if line.strip()]

    def record(self, name: str) -> Mapping[str, Any]:
        """A JSON object of the pack."""
        return parse_record(self.opened.read(name))


def read_contents(opened: Opened) -> Contents:
    """The manifest of a pack; ConfigError unless it is one that this module can vouch for."""
    manifest = opened.manifest
    try:
        found = Contents(
            opened=opened,
            name=_text(manifest["name"])[:80],
            is_campaign={"run": False, "campaign": True}[manifest["kind"]],
            python=_text(manifest["python"], _VERSION.fullmatch),
            threads={_text(k, _NAME.fullmatch): _text(v, _THREADS.fullmatch) for k, v in _threads(manifest).items()},
            files=tuple(_file(each, opened) for key in ("placed", "left_out") for each in manifest[key]),
            wheels=tuple(_wheel(name, each, opened) for name, each in sorted(manifest["wheels"].items())),
            packages={name: _package(name, each) for name, each in sorted(manifest["packages"].items())},
            runs=tuple(_run(each, opened) for each in manifest["runs"]),
            moved={_text(old): _text(new, is_safe) for old, new in manifest["moved"].items()},
            margin=_margin(manifest["equivalence"]),
            verdict=manifest["verdict"] if isinstance(manifest["verdict"], dict) else None,
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise refused(opened.file, f"its manifest cannot be used: {str(error)[:200]}") from error
    places = [file.place.casefold() for file in found.files]
    parents = {str(parent) for place in places for parent in PurePosixPath(place).parents}
    if len(set(places)) < len(places) or parents & set(places) or not found.runs or CONFIG_FILE not in opened.files:
        raise refused(opened.file, "its manifest cannot be used: no run, no configuration, or two files in one place")
    return found


def _threads(manifest: Mapping[str, Any]) -> Mapping[str, Any]:
    threads = manifest["hardware"].get("threads", {})
    if set(threads) - {"OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"}:
        raise ValueError("threads are no variables of threads")
    return dict(threads)


def _text(value: object, fits: Callable[[str], object] = lambda _: True) -> str:
    if not isinstance(value, str) or not fits(value):
        raise ValueError(f"{str(value)[:80]!r} is not what is expected there")
    return value


def _member(name: object, opened: Opened) -> str:
    return _text(name, lambda value: value in opened.files)


def _file(each: Mapping[str, Any], opened: Opened) -> PlacedFile:
    kind = _text(each["kind"], lambda value: value in ("code", "data", "model"))
    member = _member(each["member"], opened) if "member" in each else ""
    place, size = _text(each["place"], is_safe), each["size"]
    if why := refusal(kind, place):
        raise ValueError(f"{place!r} {why}")
    if type(size) is not int or place.casefold().partition("/")[0] in (CONFIG_FILE, "rerun"):
        raise ValueError(f"{place!r} cannot be laid there")
    return PlacedFile(
        kind=kind, name=_text(each["name"]), place=place, member=member, hash=_text(each["hash"]), size=size
    )


def _wheel(name: str, each: Mapping[str, Any], opened: Opened) -> PackedWheel:
    member = _text(_member(each["member"], opened), _WHEEL.fullmatch)
    return PackedWheel(
        name=_text(name, _NAME.fullmatch),
        version=_text(each["version"], _VERSION.fullmatch),
        member=member,
    )


def _package(name: str, each: Mapping[str, Any]) -> Mapping[str, str]:
    _text(name, _NAME.fullmatch)
    version, digest = _text(each["version"], _VERSION.fullmatch), _text(each["digest"], _DIGEST.fullmatch)
    return {"version": version, "digest": digest}


def _run(each: Mapping[str, Any], opened: Opened) -> PackedRun:
    name, place = _text(each["name"]), _text(each["place"], is_safe)
    if name and (not is_safe(name) or "/" in name):
        raise ValueError(f"{name[:80]!r} cannot be the name of a run")
    for record in (METRICS, RUN_FILE):
        _member(f"{place}/{record}", opened)
    seed, steps = each["seed"], each["steps"]
    if type(steps) is not int or not (seed is None or type(seed) is int):
        raise ValueError("a run has no number of steps")
    weights = {_text(file): _text(digest) for file, digest in each["weights"].items()}
    identity = _member(each["identity"], opened)
    condition = _text(each["condition"])
    return PackedRun(
        name=name, place=place, condition=condition, seed=seed, steps=steps, identity=identity, weights=weights
    )


def _margin(value: object) -> float | None:
    if value is None:
        return None
    if not isinstance(value, float | int) or isinstance(value, bool) or not 0.0 < value <= 1.0:
        raise ValueError("the margin of equivalence is not in (0, 1]")
    return float(value)
