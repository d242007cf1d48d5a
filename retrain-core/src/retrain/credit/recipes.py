"""`[algorithm] recipe`: an algorithm under one name, as defaults of many keys; a key that is set beats its recipe."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from retrain.kernel.config.keys import keys_of
from retrain.kernel.config.load import Setting, TableEntry, all_keys
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.declared import Kind, TableTraits
from retrain.kernel.errors import PluginError, Problem, RetrainError
from retrain.kernel.plugins.resolve import problem_with, resolve
from retrain.kernel.registry import Plugins
from retrain.records.identity.inputs import PARAMS
from retrain.text.secrets import hide

KEY = "algorithm.recipe"
# The values of a recipe for a part apply only while the part is the one that the recipe names. `distil.alpha` is not
# listed under `distil.mode`: another mode of `sdft` would silently have another divergence.
PART_OF = {
    **{options: key for _, key, options in PARAMS if key.startswith("algorithm.")},
    **dict.fromkeys(("algorithm.clip_eps", "algorithm.clip_eps_high", "algorithm.dual_clip"), "algorithm.loss"),
}
Values = Mapping[str, Mapping[str, Any]]  # by table and key


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A recipe: values by `table.key`, and the plugin that offers it."""

    name: str
    owner: str
    values: Mapping[str, Any]

    @property
    def place(self) -> str:
        return f"recipe {self.name}"

    def is_replaced_by(self, algorithm_mode: Any) -> bool:
        """True if this `algorithm_mode` means another algorithm than the recipe."""
        return bool(algorithm_mode) and algorithm_mode != self.values.get("algorithm.algorithm_mode")

    def values_beside(self, given: Values) -> dict[str, Any]:
        """Return the values, except keys of a part (`clip_eps` of the loss) where `given` names another part."""

        def is_own(part: str) -> bool:
            table, _, name = part.partition(".")
            return part not in self.values or given.get(table, {}).get(name, self.values[part]) == self.values[part]

        return {path: value for path, value in self.values.items() if is_own(PART_OF.get(path, ""))}


def find_recipe(plugins: Plugins, name: str, *, where: str, search_paths: Sequence[str]) -> Recipe:
    """Return the recipe of this name; PluginError if it is missing, or not a mapping from `table.key` to values."""
    found = resolve(plugins, Kind.RECIPE, name, where=where, search_paths=search_paths)
    values = found.target
    if not isinstance(values, Mapping) or not all(isinstance(path, str) for path in values):
        what = f"recipe {name!r} of {found.owner} is {type(values).__name__}, not a mapping"
        fix = 'write {"table.key": value, ...}'
        raise PluginError(Problem(code="recipe.not-a-mapping", where=where, what=what, fix=fix))
    return Recipe(name=found.name, owner=str(found.owner), values=values)


def recipe_values(
    plugins: Plugins, tables: Mapping[str, TableEntry], given: Values
) -> tuple[list[Setting], list[Problem]]:
    """The values of the recipe that `given` names, for keys that are not given, and the problems with them.

    Entries of a free table are added to those given. The check of all names reports a name that no plugin provides.
    """
    name, paths = given["algorithm"]["recipe"], given.get("plugins", {}).get("search_paths", ["plugins"])
    if not isinstance(name, str) or not isinstance(paths, list):
        return [], []
    if problem_with(plugins, Kind.RECIPE, name, where="", search_paths=paths):
        return [], []
    try:
        recipe = find_recipe(plugins, name, where="[algorithm] recipe", search_paths=paths)
    except RetrainError as error:
        return [], list(error.problems)
    if recipe.is_replaced_by(given["algorithm"].get("algorithm_mode")):
        return [], []
    problems = _problems_of(recipe, tables)
    refused = {problem.where for problem in problems}
    origin, settings = Origin(layer=Layer.RECIPE, place=recipe.place), []
    for path, value in recipe.values_beside(given).items():
        table, _, key = path.partition(".")
        own = given.get(table, {}).get(key)
        if _where(recipe, path) in refused or (own is not None and not isinstance(own, Mapping)):
            continue
        settings.append(
            Setting(path=path, value={**value, **(own or {})} if isinstance(value, Mapping) else value, origin=origin)
        )
    return settings, problems


def _where(recipe: Recipe, path: str) -> str:
    table, _, key = path.partition(".")
    return f"{recipe.place} [{table}] {key}"


def _problems_of(recipe: Recipe, tables: Mapping[str, TableEntry]) -> list[Problem]:
    keys, problems = {key.path: key for key in all_keys(tables)}, []
    for path in recipe.values:
        key = keys.get(path)
        if key is None:
            fix = "`retrain explain --keys` lists every key"
            found = Problem(code="config.unknown-key", what="unknown key", fix=fix)
        elif path == KEY:
            what, fix = "a recipe cannot name another one", "write its values here"
            found = Problem(code="recipe.names-recipe", what=what, fix=fix)
        elif key.free_on_resume or tables[key.table].traits.starts_runs:
            what, fix = "belongs to a run, so a recipe cannot set it", "remove it, and set it in the configuration"
            found = Problem(code="recipe.key-of-run", what=what, fix=fix)
        else:
            continue
        problems.append(replace(found, where=_where(recipe, path), why=told(recipe)))
    return problems


def told(recipe: Recipe) -> str:
    return f"recipe {recipe.name!r} comes from {recipe.owner}"


def configured_recipe(config: Config, plugins: Plugins) -> Recipe | None:
    """The recipe that a configuration names; None when it names none, or one that cannot be loaded."""
    name = config.algorithm.recipe
    if not name:
        return None
    try:
        return find_recipe(plugins, name, where=config.place(KEY), search_paths=config.plugins.search_paths)
    except RetrainError:  # reported with the other names
        return None


def with_owner(problems: Iterable[Problem], config: Config, plugins: Plugins) -> list[Problem]:
    """The same problems; those about a value of a recipe say which plugin the recipe comes from."""
    found = list(problems)
    if not any(problem.where.startswith("recipe ") for problem in found):
        return found
    recipe = configured_recipe(config, plugins)
    return [
        replace(problem, why="\n    ".join(filter(None, (told(recipe), problem.why))))
        if recipe and problem.where.startswith(f"{recipe.place} ") and told(recipe) not in problem.why
        else problem
        for problem in found
    ]


def mode_problems(config: Config, plugins: Plugins) -> list[Problem]:
    recipe, mode = configured_recipe(config, plugins), config.algorithm.algorithm_mode
    if recipe is None or not recipe.is_replaced_by(mode):
        return []
    what, fix = f"{mode!r} replaces the advantage and the transform of {recipe.place}", "remove one of the two"
    return [Problem(code="recipe.replaced", where=config.place("algorithm.algorithm_mode"), what=what, fix=fix)]


def departures(config: Config, recipe: Recipe, plugins: Plugins) -> dict[str, Any]:
    """The values in which a run departs from its recipe, by flat name: `loss`, `kl_coef`, `advantage_params.scale`.

    Compared are the keys that the recipe sets, and all others in `[algorithm]`, left at their defaults by the recipe.
    """
    tables = config.as_dict()
    defaults = type(config.algorithm)().model_dump(mode="json", by_alias=True, exclude_none=True)
    expected: dict[str, Any] = {f"algorithm.{name}": value for name, value in defaults.items()}
    expected |= recipe.values_beside(tables)
    found: dict[str, Any] = {}
    for path, value in expected.items():
        table, _, key = path.partition(".")
        if path == KEY or table not in tables:
            continue
        actual, flat = tables[table].get(key), _flat_name(config, path, plugins)
        if isinstance(value, Mapping) and isinstance(actual, Mapping):
            names = sorted({*value, *actual})
            found |= {f"{flat}.{name}": actual.get(name) for name in names if actual.get(name) != value.get(name)}
        elif actual != value:
            found[flat] = actual
    return found


def _flat_name(config: Config, path: str, plugins: Plugins) -> str:
    """The key as a flag spells it, with underscores, as in the labels of a campaign."""
    table = path.partition(".")[0]
    traits = plugins.traits_of(Kind.CONFIG_TABLE, table, TableTraits) or TableTraits()
    keys = keys_of(table, type(config.tables[table]), traits.flag_prefix)
    return next((key.flag.replace("-", "_") for key in keys if key.path == path), path)


def recipe_label(config: Config, plugins: Plugins) -> str:
    """`dapo`, or `dapo~loss=importance_sampling` where the run departs from its recipe; empty without a recipe."""
    recipe = configured_recipe(config, plugins)
    return label_with(recipe.name, departures(config, recipe, plugins)) if recipe else config.algorithm.recipe


def label_with(base: str, overrides: Mapping[str, Any]) -> str:
    """`base~k=v,...`; secrets are hidden, since folders are named after labels."""
    pairs = ",".join(f"{name}={_shown(value)}" for name, value in sorted(hide(dict(overrides)).items()))
    return base + (f"~{pairs}" if pairs else "")


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)
