"""Which parts a configuration selects, and where each comes from; no part is imported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from retrain.credit.configured_loss import KEY as LOSS
from retrain.credit.configured_loss import selected_loss
from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Kind
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.resolve import module_of
from retrain.kernel.registry import Plugins
from retrain.records.identity.collect import Identity, collect_identity
from retrain.records.identity.imports import module_file, part_file
from retrain.run.check import chosen_name, name_problem, wanted_names
from retrain.tasks.scoring.build import brings_tasks

DOTTED = "dotted path"
CREDIT = {
    "algorithm.advantage_mode": Kind.ADVANTAGE,
    "algorithm.transform_mode": Kind.TRANSFORM,
    "algorithm.uncertainty_kind": Kind.UNCERTAINTY,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Selected:
    """A part by the key that names it.

    `source` is its distribution and version, or `dotted path`; empty when no plugin provides it, as `problem` says.
    """

    key: str
    kind: Kind
    name: str
    source: str
    distribution: str
    file: str
    problem: Problem | None


def selected_parts(config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]) -> list[Selected]:
    """Every part that a run with this configuration builds because a key names it, in the order of the kinds."""
    wanted = wanted_names(config, tables)
    if mode := config.algorithm.algorithm_mode:
        wanted["algorithm.algorithm_mode"] = (Kind.ALGORITHM, mode)
    else:
        wanted |= {path: (kind, chosen_name(config, path, kind)) for path, kind in CREDIT.items()}
    if loss := selected_loss(config, plugins):
        wanted[LOSS] = (Kind.LOSS, loss)
    if engine := config.inference.engine:
        wanted["inference.engine"] = (Kind.INFERENCE_ENGINE, engine)
    if brings_tasks(config, plugins):
        wanted = {path: part for path, part in wanted.items() if path not in ("data.source", "reward.type")}
    order = list(Kind)
    found = [_selected(config, plugins, path, *part) for path, part in wanted.items()]
    return sorted(found, key=lambda part: order.index(part.kind))


def identity_of(config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]) -> Identity:
    """What a run with this configuration consists of besides it: code, data, model files, plugins."""
    named = [part.name for part in selected_parts(config, plugins, tables) if part.source == DOTTED]
    modules = [module_of(name, config.plugins.search_paths) for name in named]
    return collect_identity(config, plugins, tables, dotted=filter(None, modules))


def _selected(config: Config, plugins: Plugins, path: str, kind: Kind, name: str) -> Selected:
    problem = name_problem(config, plugins, path, kind, name)
    source = distribution = file = ""
    if entries := plugins.find(kind, name):
        owner = entries[0].owner
        source, distribution, file = str(owner), owner.distribution, part_file(entries[0].spec)
    elif problem is None:
        source, file = DOTTED, module_file(module_of(name, config.plugins.search_paths))
    return Selected(
        key=path, kind=kind, name=name, source=source, distribution=distribution, file=file, problem=problem
    )
