"""The plugins of a run as wheels, and the versions of the packages that they need: what a rerun installs."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from retrain.kernel.errors import ConfigError, Problem
from retrain.records.identity.collect import Identity
from retrain.records.identity.hashing import Budget
from retrain.records.identity.plugin_files import plugin_files
from retrain.tools.pack.leaks import Leak, leaks_in
from retrain.tools.pack.packages import extras_of, installed_digests, required
from retrain.tools.pack.wheels import wheel_of

FIX = "pack in the environment in which it ran, or run it again here and pack that run"


@dataclass(slots=True, kw_only=True)
class Software:
    """`wheels` and `packages` as the manifest has them, the wheels' bytes by member, and secrets in their files."""

    wheels: dict[str, dict[str, Any]] = field(default_factory=dict)
    packages: dict[str, dict[str, str]] = field(default_factory=dict)
    members: dict[str, bytes] = field(default_factory=dict)
    leaks: list[Leak] = field(default_factory=list)


def collect_software(
    identities: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]], words: Iterable[str]
) -> Software:
    """The software of runs as it is here; ConfigError says in what it is not that which ran.

    `records` are their `run.json`, `words` the names of parts that the configuration selects.
    """
    plugins: dict[str, dict[str, Any]] = {}
    others: set[str] = set()
    for identity in identities:
        plugins |= identity.get("plugins") or {}
        others |= set(identity.get("packages") or {})
    modules = {name: _modules(plugin) for name, plugin in plugins.items()}
    problems = [*_changed_plugins(plugins, modules)]
    selected = list(words)
    found, roots = Software(), {name: list[str]() for name in others}
    for name, plugin in plugins.items() if not problems else ():
        wheel = wheel_of(name, str(plugin["version"]), modules[name])
        is_ours = bool(plugin.get("first_party"))
        roots[name] = extras_of(name, selected)
        member = f"wheels/{wheel.file}"
        found.members[member] = wheel.content
        entry = {"version": plugin["version"], "member": member, "extras": roots[name], "editable": wheel.is_editable}
        digest = hashlib.sha256(wheel.content).hexdigest()
        found.wheels[name] = {**entry, "first_party": is_ours, "files": len(wheel.sources), "sha256": digest}
        for source, content in wheel.sources.items():
            leaks = leaks_in(f"{name}: {source}", content)
            found.leaks += [leak for leak in leaks if not is_ours or "environment" in leak.what]
    versions = {name: version for name, version in required(roots).items() if name not in found.wheels}
    for record in records:
        libraries = record.get("libraries") or {}
        problems += [
            Problem(where=name, what=f"was {libraries[name]} when the run ran, and is {version} here", fix=FIX)
            for name, version in versions.items()
            if name in libraries and libraries[name] != version
        ]
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    found.packages = installed_digests(versions)
    return found


def _modules(plugin: Mapping[str, Any]) -> set[str]:
    """The top-level modules of a distribution, by the files that the run recorded of it."""
    return {name.partition("/")[0].removesuffix(".py") for name in plugin.get("files") or {}}


def _changed_plugins(plugins: Mapping[str, Mapping[str, Any]], modules: dict[str, set[str]]) -> Iterator[Problem]:
    now = Identity(plugins=plugin_files(modules, Budget())).as_data()["plugins"]
    for name, before in plugins.items():
        found = now.get(name, {})
        if "files" not in before:
            yield Problem(where=name, what="inputs/files.json, which lists its files, is missing or damaged", fix=FIX)
        elif found.get("version") != before.get("version"):
            what = (
                f"was {before.get('version')} when the run ran, and is {found.get('version') or 'not installed'} here"
            )
            yield Problem(where=name, what=what, fix=FIX)
        elif found.get("digest") != before.get("digest"):
            files, listed = found["files"], before["files"]
            names = (each for each in sorted({*files, *listed}) if _hash(files, each) != _hash(listed, each))
            what = f"its files are not those that ran: {next(names, '')} differs"
            yield Problem(where=name, what=what, fix=FIX)


def _hash(files: Mapping[str, Any], name: str) -> Any:
    return (files.get(name) or {}).get("hash")
