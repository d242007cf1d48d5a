"""Finds plugins through entry points, reading metadata, and lets each register.

The distribution `importlib-metadata` makes discovery behave the same on every Python.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pluggy
from importlib_metadata import EntryPoint, entry_points

from retrain.kernel import hooks
from retrain.kernel.registry import LoadFailure, Owner, Plugins
from retrain.kernel.version import __version__

if TYPE_CHECKING:
    from importlib_metadata import IDistribution

GROUP, KERNEL = "retrain", "retrain-core"
# `retrain-core<0.2,>=0.1.0`, as in wheels; a requirement with a marker is conditional, or of an extra.
CORE_REQUIREMENT = re.compile(r"retrain[-_.]+core(?![-\w.])\s*(?:\[[^\]]*\])?\s*\(?([^;)]*)\)?\s*", flags=re.IGNORECASE)
HEADER = re.compile(r"^(Name|Version|Requires-Dist):[ \t]*(.*?)[ \t]*$", flags=re.MULTILINE)


def load_plugins(environ: dict[str, str] | None = None) -> Plugins:
    """Discover and register every plugin.

    `RETRAIN_PLUGINS=a,b` loads only those distributions (retrain-core always), `RETRAIN_BLOCK=x,y` leaves some out.
    """
    settings = dict(os.environ) if environ is None else environ
    only, blocked = _names(settings.get("RETRAIN_PLUGINS")), _names(settings.get("RETRAIN_BLOCK"))
    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(hooks)
    plugins = Plugins(pluggy=manager)
    present = set()
    for offer in offered_plugins():
        source = offer.entry.value
        owner = Owner(distribution=offer.distribution or "unknown", version=offer.version, source=source)
        name = normal_name(owner.distribution)
        present.add(name)
        # The kernel's own plugin registers [training], [model], ...: without it no configuration could be read.
        if name != KERNEL and (name in blocked or (only and name not in only)):
            plugins.left_out.add(name)
            continue
        if offer.unmet:
            plugins.failures.append(LoadFailure(owner=owner, error=offer.unmet))
            continue
        try:
            plugin = offer.entry.load()
        # Importing a third-party module may raise anything, and must not affect the other plugins.
        except Exception as error:
            plugins.failures.append(LoadFailure(owner=owner, error=f"{type(error).__name__}: {error}"))
            continue
        plugins.add(plugin, owner)
    for name in sorted((only | blocked) - present):
        owner = Owner(distribution=name, source="RETRAIN_PLUGINS or RETRAIN_BLOCK")
        plugins.failures.append(LoadFailure(owner=owner, error="no such distribution offers plugins"))
    return plugins


def _names(text: str | None) -> frozenset[str]:
    return frozenset(normal_name(part.strip()) for part in (text or "").split(",") if part.strip())


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """An entry point of the group `retrain`, with the name and version of its distribution; empty without one.

    `unmet` names a requirement on retrain-core that is not met, if any.
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
        # A distribution can be on the path twice, for example installed and as an editable folder.
        if (name, entry.name) in seen:
            continue
        seen.add((name, entry.name))
        yield Offer(entry=entry, distribution=name, version=version, unmet=unmet)


def headers_of(dist: IDistribution) -> tuple[str, str, Sequence[str]]:
    """Name, version and requirements, read without `email`, whose import is a sixth of the time of `retrain --help`."""
    text = dist.read_text("METADATA")
    if text is None:
        return dist.name, dist.version, dist.requires or ()
    found = HEADER.findall(text.partition("\n\n")[0])
    # Reversed, so that the first of a repeated header counts, as it does for `email`.
    first = dict(reversed(found))
    return first.get("Name", ""), first.get("Version", ""), [value for key, value in found if key == "Requires-Dist"]


def unmet_requirement(name: str, requires: Sequence[str]) -> str:
    """The unmet requirement of a plugin's distribution on retrain-core, with the fix, if any."""
    for line in requires:
        found = CORE_REQUIREMENT.fullmatch(line)
        wanted = found.group(1).strip() if found else ""
        # The usual pin of first-party wheels is compared as text, so that `retrain --help` does not import `packaging`.
        if wanted and wanted != f"=={__version__}" and not _is_met(wanted):
            return (
                f"it requires retrain-core {wanted}, and this is {__version__}; "
                f"fix: pip install --upgrade {name}, or install a retrain-core that it accepts"
            )
    return ""


def _is_met(wanted: str) -> bool:
    # Imported here, because only third-party plugins need it.
    from packaging.specifiers import InvalidSpecifier, SpecifierSet

    with suppress(InvalidSpecifier):
        # By default a development version of the core would satisfy no plugin that names only releases.
        return SpecifierSet(wanted).contains(__version__, prereleases=True)
    return False


def normal_name(name: str) -> str:
    """One spelling for the names that package indexes treat as the same: `a_b`, `a.b`, `A-b`."""
    return re.sub(r"[-_.]+", "-", name).lower()
