"""Compares settings, code and packages of two runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.records.identity.changes import Change, changes_between, source_diff
from retrain.records.reading import Record, table_of
from retrain.records.run import Run, accepted_changes

PLACES = frozenset({"logging.log_dir", "backend.adapter_path"})  # paths of records do not affect results
_ABSENT = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One run's `run.json`, its settings by `table.key`, and the files that it recorded as its inputs."""

    manifest: Record
    settings: Mapping[str, Any]
    identity: Mapping[str, Any] = field(default_factory=dict)

    def origin(self, path: str) -> str:
        """Where a setting came from: a line of a file, a flag, or `default`."""
        origins = table_of(self.manifest, "origins")
        while path:
            if path in origins:
                return str(origins[path])
            path = path.rpartition(".")[0]
        return "default"

    def packages(self) -> dict[str, str]:
        """Version of Python, of every distribution that registered something, and of every relevant library."""
        found = {"python": str(self.manifest.get("python", ""))}
        for name in ("libraries", "distributions"):
            found |= {package: str(release) for package, release in table_of(self.manifest, name).items()}
        return found

    def code(self) -> dict[str, Any]:
        """Commit and whether there were uncommitted changes; both None outside a repository."""
        git = table_of(self.manifest, "git")
        return {"commit": git.get("commit"), "dirty": git.get("dirty")}


@dataclass(frozen=True, slots=True, kw_only=True)
class SetupDiff:
    """Differing settings and packages by name (no value for a side that lacks one), and the code of both.

    `same_code` is None if unknown: no repository, or uncommitted changes. `inputs` are the differing files of code,
    data, model and plugins, each with the unified diff of the copies that the runs kept; None when a run recorded none.
    `accepted_a` and `accepted_b` are changes that the runs were resumed with by `--resume-anyway`.
    """

    settings: Mapping[str, Mapping[str, Any]]
    packages: Mapping[str, Mapping[str, str]]
    code_a: Mapping[str, Any]
    code_b: Mapping[str, Any]
    same_code: bool | None
    inputs: tuple[tuple[Change, tuple[str, ...]], ...] | None = None
    accepted_a: tuple[str, ...] = ()
    accepted_b: tuple[str, ...] = ()

    def as_data(self) -> dict[str, Any]:
        """The documented JSON form."""
        return {
            "config": self.settings,
            "code": {"same": self.same_code, "a": self.code_a, "b": self.code_b},
            "packages": self.packages,
            "inputs": None if self.inputs is None else [_input_data(change, diff) for change, diff in self.inputs],
            "accepted_a": list(self.accepted_a),
            "accepted_b": list(self.accepted_b),
        }


def read_setup(folder: Path) -> Setup:
    """Read `run.json` and `config.toml`; ConfigError with file and line if they cannot be read."""
    run = Run(folder)
    return Setup(manifest=run.manifest, settings=_flat(run.settings), identity=run.identity)


def compare_setups(a: Setup, b: Setup) -> SetupDiff:
    """Every difference except the paths of records."""
    settings = {}
    for path in sorted({*a.settings, *b.settings} - PLACES):
        values = a.settings.get(path, _ABSENT), b.settings.get(path, _ABSENT)
        if type(values[0]) is not type(values[1]) or values[0] != values[1]:
            origins = {f"origin_{side}": run.origin(path) for side, run in (("a", a), ("b", b)) if path in run.settings}
            settings[path] = _pair(*values) | origins
    packages_a, packages_b = a.packages(), b.packages()
    packages = {
        name: _pair(packages_a.get(name, _ABSENT), packages_b.get(name, _ABSENT))
        for name in sorted({*packages_a, *packages_b})
        if packages_a.get(name) != packages_b.get(name)
    }
    code_a, code_b = a.code(), b.code()
    same: bool | None = code_a["commit"] == code_b["commit"]
    if not code_a["commit"] or not code_b["commit"] or (same and (code_a["dirty"] or code_b["dirty"])):
        same = None
    return SetupDiff(
        settings=settings,
        packages=packages,
        code_a=code_a,
        code_b=code_b,
        same_code=same,
        inputs=_inputs(a.identity, b.identity),
        accepted_a=tuple(accepted_changes(a.manifest)),
        accepted_b=tuple(accepted_changes(b.manifest)),
    )


def _inputs(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[tuple[Change, tuple[str, ...]], ...] | None:
    if not a or not b:
        return None
    return tuple((change, tuple(source_diff(change, a, b))) for change in changes_between(a, b))


def _input_data(change: Change, diff: Sequence[str]) -> dict[str, Any]:
    """A differing input as JSON; `line` is the first differing one, 0 without copies."""
    named = {"kind": str(change.kind), "name": change.name, "distribution": change.owner, "what": change.what}
    return named | {"line": change.line, "a": change.before, "b": change.now, "diff": list(diff)}


def _flat(tables: Record, prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tables.items():
        path = f"{prefix}{name}"
        flat |= _flat(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return {path: value for path, value in flat.items() if value != {}}


def _pair(a: Any, b: Any) -> dict[str, Any]:
    return {side: value for side, value in (("a", a), ("b", b)) if value is not _ABSENT}
