"""The stages of credit that a flag switches on, found by name among the registered transforms.

Their maths is not in this distribution: a registered `TransformSpec` carries it in `stages`. A flag whose stage is not
installed gives the error of a missing plugin.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from functools import lru_cache

from retrain.credit.forms import as_transform
from retrain.credit.specs import CreditStage
from retrain.kernel.errors import PluginError, Problem
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.resolve import problem_with, resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.types import Kind

GTPO, HICRA, TOP_RHO = "gtpo", "hicra", "top_rho"
CARRIERS = {GTPO: "gtpo", HICRA: "gtpo_hicra", TOP_RHO: "gtpo"}  # stage -> the transform that carries it
Settings = tuple[str | None, str | None]  # RETRAIN_PLUGINS and RETRAIN_BLOCK


def find_stage(plugins: Plugins, name: str, *, where: str, needed_by: str) -> CreditStage:
    """The stage `name`; PluginError says which distribution provides it when it is missing.

    `where` is the place of the setting that switches it on, `needed_by` the part that uses it: for the message.
    """
    carrier = CARRIERS[name]
    problem = problem_with(plugins, Kind.TRANSFORM, carrier, where=where)
    if problem is not None:
        what = f"{needed_by} needs stage {name!r}, and there is {problem.what}"
        raise PluginError(replace(problem, what=what))
    found = resolve(plugins, Kind.TRANSFORM, carrier, where=where)
    stage = as_transform(found).stages.get(name)
    if stage is None:
        what = f"transform {carrier!r} of {found.owner} carries no stage {name!r}"
        fix = f"give its TransformSpec stages={{{name!r}: CreditStage(...)}}, or leave out {found.owner.distribution}"
        raise PluginError(Problem(where=where, what=what, fix=fix))
    return stage


def optional_stage(plugins: Plugins, name: str) -> CreditStage | None:
    """The stage `name` if exactly one distribution provides it."""
    if len(plugins.find(Kind.TRANSFORM, CARRIERS[name])) != 1:
        return None
    found = resolve(plugins, Kind.TRANSFORM, CARRIERS[name], where=f"stage {name!r}")
    return as_transform(found).stages.get(name)


def public_stage(name: str, *, needed_by: str) -> CreditStage:
    """The stage `name` for a call outside a run."""
    return _public_stage(name, needed_by, _settings(), tuple(sys.path))


def installed_plugins() -> Plugins:
    """Everything that is plugged in, discovered again only when the answer could have changed.

    It can after a change of `RETRAIN_PLUGINS`, `RETRAIN_BLOCK` or `sys.path`, and of a folder on that path, which
    installing a distribution changes. The result is shared: read it only. A run calls `load_plugins` itself.
    """
    return _discovered(_settings(), tuple((folder, _changed_at(folder)) for folder in sys.path))


def _settings() -> Settings:
    return os.environ.get("RETRAIN_PLUGINS"), os.environ.get("RETRAIN_BLOCK")


@lru_cache(maxsize=16)
def _public_stage(name: str, needed_by: str, settings: Settings, path: tuple[str, ...]) -> CreditStage:
    """Keyed by what decides which plugins are found. A missing stage raises, so it is never cached."""
    return find_stage(installed_plugins(), name, where="retrain.advantages", needed_by=needed_by)


@lru_cache(maxsize=4)
def _discovered(settings: Settings, path: tuple[tuple[str, int], ...]) -> Plugins:
    """Keyed by what decides which plugins are found."""
    return load_plugins()


def _changed_at(folder: str) -> int:
    try:
        return os.stat(folder or ".").st_mtime_ns
    except OSError:
        return 0
