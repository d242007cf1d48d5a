"""Which distributions are installed, what they offer and what they require: read from metadata, without importing any.

No other module of this repository reads metadata. The distribution `importlib-metadata` makes discovery behave the same
on every Python.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from importlib_metadata import EntryPoint, PackageNotFoundError, distribution, distributions, entry_points

from retrain.kernel.version import __version__

if TYPE_CHECKING:
    from importlib_metadata import IDistribution, IPackagePath

GROUP, KERNEL = "retrain", "retrain-core"
# `retrain-core<0.2,>=0.1.0`, as in wheels; a requirement with a marker applies elsewhere, or to an extra.
CORE_REQUIREMENT = re.compile(r"retrain[-_.]+core(?![-\w.])\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*", flags=re.IGNORECASE)
PROJECT_NAME = re.compile(r"[A-Za-z0-9][-\w.]*")
HEADER = re.compile(r"^(Name|Version|Requires-Dist):[ \t]*(.*?)[ \t]*$", flags=re.MULTILINE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An entry point of the group `retrain`, with the name and version of its distribution; empty if it has none.

    `unmet` names a requirement on retrain-core that is not met; empty when there is none.
    """

    entry: EntryPoint
    distribution: str
    version: str
    unmet: str


def offered_plugins() -> Iterator[Offer]:
    """Every entry point of the group `retrain` once, sorted by distribution and name."""
    facts: dict[int, tuple[str, str, str]] = {}  # by distribution
    found = []
    for entry in entry_points(group=GROUP):
        dist = entry.dist
        if dist is not None and id(dist) not in facts:
            name, version, requires = headers_of(dist)
            facts[id(dist)] = name, version, "" if name == KERNEL else unmet_requirement(name, requires)
        found.append((facts[id(dist)] if dist is not None else ("", "", ""), entry))
    seen: set[tuple[str, str]] = set()
    for (name, version, unmet), entry in sorted(found, key=lambda each: (each[0][0], each[1].name)):
        if (name, entry.name) in seen:  # the same distribution twice on the path
            continue
        seen.add((name, entry.name))
        yield Offer(entry=entry, distribution=name, version=version, unmet=unmet)


def versions_of(names: Iterable[str]) -> dict[str, str]:
    """The version in each distribution's metadata; those without metadata are left out."""
    found = {}
    for name in names:
        with suppress(PackageNotFoundError):
            found[name] = distribution(name).version
    return found


def files_of(name: str) -> tuple[IPackagePath, ...]:
    """The files of an installed distribution with their recorded hashes; empty when there are none on record."""
    with suppress(PackageNotFoundError):
        return tuple(distribution(name).files or ())
    return ()


def installed_version(name: str) -> str:
    """Version of a distribution whose modules are present; empty otherwise. Imports nothing."""
    with suppress(PackageNotFoundError):
        found = distribution(name)
        return found.version if _can_import(re.sub(r"[-.]+", "_", name)) or _has_modules(found) else ""
    return ""


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


def source_folder(name: str) -> Path | None:
    """The local folder that a distribution was installed from by path; None if it came from a wheel or an index."""
    import json  # only an error message needs them
    from urllib.parse import unquote, urlsplit

    text: str | None = None
    with suppress(PackageNotFoundError):
        text = distribution(name).read_text("direct_url.json")
    record = json.loads(text) if text else {}
    return Path(unquote(urlsplit(record["url"]).path)) if "dir_info" in record else None


def unmet_requirement(name: str, requires: Sequence[str]) -> str:
    """The unmet requirement of a plugin's distribution on retrain-core, with the fix; empty when there is none."""
    for line in requires:
        found = CORE_REQUIREMENT.fullmatch(line)
        wanted = found.group(1).strip() if found else ""
        if wanted and wanted != f"=={__version__}" and not _is_met(wanted):
            return (
                f"it requires retrain-core {wanted}, and this is {__version__}; "
                f"fix: pip install --upgrade {name}, or install a retrain-core that it accepts"
            )
    return ""


def normal_name(name: str) -> str:
    """One spelling for the names that package indexes treat as the same: `a_b`, `a.b`, `A-b`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def headers_of(dist: IDistribution) -> tuple[str, str, Sequence[str]]:
    """Name, version and requirements, read without `email`, whose import is a sixth of the time of `retrain --help`."""
    text = dist.read_text("METADATA")
    if text is None:
        return dist.name, dist.version, dist.requires or ()
    found = HEADER.findall(text.partition("\n\n")[0])
    first = dict(reversed(found))
    return first.get("Name", ""), first.get("Version", ""), [value for key, value in found if key == "Requires-Dist"]


def _is_met(wanted: str) -> bool:
    from packaging.specifiers import InvalidSpecifier, SpecifierSet  # only third-party plugins need it

    with suppress(InvalidSpecifier):
        return SpecifierSet(wanted).contains(__version__, prereleases=True)
    return False


def _has_modules(found: IDistribution) -> bool:
    """Whether any of its modules can be imported; True when its metadata name no module."""
    listed = (found.read_text("top_level.txt") or "").split()
    files = {file.parts[0] for file in found.files or () if str(file).endswith(".py")}
    modules = {name.removesuffix(".py") for name in (*listed, *files)}
    return not modules or any(map(_can_import, modules))


def _can_import(module: str) -> bool:
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(module) is not None
    return False
