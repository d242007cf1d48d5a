"""Requirements of installed distributions, and whether they are met."""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass

from importlib_metadata import PackageNotFoundError, distribution, distributions
from packaging.requirements import InvalidRequirement, Requirement

from retrain.kernel.plugins.discover import normal_name
from retrain.kernel.plugins.installed import installed_version

PROJECT_NAME = re.compile(r"[A-Za-z0-9][-\w.]*")


def requirements_of(name: str) -> tuple[str, ...]:
    """The requirements in a distribution's metadata, extras included; empty when it is not installed."""
    with suppress(PackageNotFoundError):
        return tuple(distribution(name).requires or ())
    return ()


def installed_dependents(name: str) -> tuple[str, ...]:
    """Names of the installed distributions that require `name`, sorted; requirements of extras count as well."""
    wanted, found = normal_name(name), set()
    for each in distributions():
        required = (PROJECT_NAME.match(line) for line in each.requires or ())
        if each.name and any(match and normal_name(match.group()) == wanted for match in required):
            found.add(each.name)
    return tuple(sorted(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """A package that another one requires.

    `wanted` are the permitted versions (`>=2.6`), `installed` is the installed version, empty without one.
    """

    name: str
    wanted: str
    installed: str
    is_met: bool

    def __str__(self) -> str:
        if self.is_met:
            return f"{self.name} {self.installed}"
        return f"{self.name} {self.installed} (wants {self.wanted})" if self.installed else self.name


def required_packages(name: str, extra: str = "") -> tuple[Package, ...]:
    """The packages a distribution requires on this machine: always, or with `extra` those which that extra adds."""
    found = []
    for line in requirements_of(name):
        try:
            wanted = Requirement(line)
        except InvalidRequirement:
            # Third-party metadata can hold a line that no installer of today accepts.
            continue
        always = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        with_extra = wanted.marker is None or wanted.marker.evaluate({"extra": extra})
        if (with_extra and not always) if extra else always:
            version = installed_version(wanted.name)
            is_met = bool(version) and wanted.specifier.contains(version, prereleases=True)
            found.append(Package(name=wanted.name, wanted=str(wanted.specifier), installed=version, is_met=is_met))
    return tuple(found)
