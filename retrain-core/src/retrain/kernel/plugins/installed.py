"""Which packages are installed, by their metadata and without importing them."""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from packaging.requirements import Requirement


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that another one requires.

    `wanted` are the versions it may have (`>=2.6`), `installed` the version that is there, empty when there is none.
    """

    name: str
    wanted: str
    installed: str
    is_met: bool

    def __str__(self) -> str:
        if self.is_met:
            return f"{self.name} {self.installed}"
        return f"{self.name} {self.installed} (wants {self.wanted})" if self.installed else self.name


def installed_version(name: str) -> str:
    """Version of a distribution whose modules are there; empty otherwise. Imports nothing."""
    try:
        found = distribution(name)
    except PackageNotFoundError:
        return ""
    return found.version if _can_import(re.sub(r"[-.]+", "_", name)) or _has_modules(found) else ""


def required_packages(name: str, extra: str = "") -> tuple[Package, ...]:
    """What a distribution requires on this machine: always, or with `extra` what that extra adds."""
    from packaging.requirements import InvalidRequirement, Requirement  # every run imports this module, few ask

    try:
        lines = distribution(name).requires or []
    except PackageNotFoundError:
        return ()
    found = []
    for line in lines:
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            continue  # of a stranger's package; pip would have refused it
        always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        if (
            always
            if not extra
            else not always and wanted.marker is not None and wanted.marker.evaluate({"extra": extra})
        ):
            found.append(_package(wanted))
    return tuple(found)


def _package(wanted: Requirement) -> Package:
    version = installed_version(wanted.name)
    is_met = bool(version) and wanted.specifier.contains(version, prereleases=True)
    return Package(name=wanted.name, wanted=str(wanted.specifier), installed=version, is_met=is_met)


def _has_modules(found: Distribution) -> bool:
    """Whether something that it brought can be imported; its metadata are trusted when they name no module."""
    listed = (found.read_text("top_level.txt") or "").split()
    files = {file.parts[0] for file in found.files or () if file.suffix == ".py"}
    modules = {name.removesuffix(".py") for name in (*listed, *files)}
    return not modules or any(map(_can_import, modules))


def _can_import(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
