"""The message about a name that no plugin provides, with the install line for a first-party one.

It gives the place that uses the name, the nearest name, every name with its distribution, and any entry point that
failed to load, with its error.
"""

from __future__ import annotations

import json
import shlex
import tomllib
from collections.abc import Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from urllib.parse import unquote, urlsplit

from importlib_metadata import PackageNotFoundError, distribution

from retrain.kernel.declared import Kind
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.first_party import CORE, promised_default, promised_names, provider
from retrain.kernel.plugins.installed import installed_version
from retrain.kernel.registry import Plugins


def missing(plugins: Plugins, kind: Kind, name: str, *, where: str, tried: Sequence[str] = ()) -> Problem:
    """The problem with a name that no plugin provides; an empty name means the default, if that is missing.

    `tried` are the modules looked for, if the name is a dotted path.
    """
    default = promised_default(kind)
    name = name or (default if not plugins.find(kind, default) else "")
    known = plugins.registered(kind)
    names = [entry.spec.name for entry in known]
    near = get_close_matches(name, [*names, *promised_names(kind)], n=1, cutoff=0.6)
    lines = [f"did you mean {near[0]!r}?"] if near and near[0] != name else []
    listed = ", ".join(f"{entry.spec.name} ({entry.owner})" for entry in known) or "none installed"
    lines.append(f"known {kind} names: {listed}")
    if tried:
        lines.append(f"as a dotted path: no module found under {', '.join(tried)}")
    lines += [f"failed to load: {each.owner} ({each.owner.source}): {each.error}" for each in plugins.failures]
    what, provided = f"no {kind} named {name!r}", _way_to_provider(plugins, kind, name, near)
    known_or_new = f"use {near[0]!r}" if near else "use a known name, or install the distribution that provides it"
    fix = provided if provided else known_or_new
    return Problem(code="plugin.missing", where=where, what=what, why="\n    ".join(lines), fix=fix)


def _way_to_provider(plugins: Plugins, kind: Kind, name: str, near: Sequence[str]) -> str:
    """The way to the first-party distribution that provides this or the nearest name; empty if none is lacking."""
    distribution = provider(kind, name) or (provider(kind, near[0]) if near else None)
    wanted = name if provider(kind, name) else (near[0] if near else name)
    if distribution is None or plugins.find(kind, wanted):
        return ""
    unbuilt = f"{wanted!r} is documented but not built in this version of {distribution}; use another {kind}"
    return way_to_get(distribution, plugins, if_installed=unbuilt)


def way_to_get(distribution: str, plugins: Plugins, *, if_installed: str) -> str:
    """The fix for something that a first-party distribution provides and no plugin registered."""
    if distribution in plugins.left_out:
        return f"{distribution} is installed, but RETRAIN_PLUGINS or RETRAIN_BLOCK leaves it out: change that"
    installed = {entry.owner.distribution for kind in Kind for entry in plugins.registered(kind)}
    return if_installed if distribution in installed else install_line(distribution)


def install_line(distribution: str, extra: str = "") -> str:
    """The command that installs a distribution here: by name, or from the clone that retrain-core was installed from.

    pip fetches a folder's requirements from its index, not from neighbouring folders, so a clone's line names them all.
    """
    suffix = f"[{extra}]" if extra else ""
    core = source_folder(CORE)
    clone = core.parent if core else None
    if clone is None or not (clone / distribution / "pyproject.toml").is_file():
        return f"pip install {shlex.quote(distribution + suffix)}"
    project = tomllib.loads((clone / distribution / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    siblings = (line.partition("==")[0] for line in project["dependencies"] if line.startswith("retrain-"))
    needed = (distribution + suffix, *(name for name in siblings if not installed_version(name)))
    constraints = clone / "constraints.txt"
    options = f"-c {shlex.quote(str(constraints))} " if constraints.is_file() else ""
    return f"pip install {options}{shlex.join(str(clone / name) for name in needed)}"


def source_folder(name: str) -> Path | None:
    """The local folder that a distribution was installed from by path; None if it came from a wheel or an index."""
    text: str | None = None
    with suppress(PackageNotFoundError):
        text = distribution(name).read_text("direct_url.json")
    record = json.loads(text) if text else {}
    return Path(unquote(urlsplit(record["url"]).path)) if "dir_info" in record else None
