"""The config tables of all plugins: each table as its owner defines it, with the keys and defaults that others add."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field, create_model

from retrain.kernel.config.load import Setting, TableEntry, load_config
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Kind, TableTraits
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.first_party import promised_names, provider
from retrain.kernel.registry import LoadFailure, Plugins, Registered
from retrain.records.run import is_run, records_of
from retrain.text.secrets import LEARNED

COPIED_CODE = "inputs/code"  # below a run, as `identity.copies` writes it
NAMES = "{names}"  # in the description of a key: the registered names of its kind


def registered_tables(plugins: Plugins, *, of_one_run: bool = False) -> dict[str, TableEntry]:
    """The config tables of all plugins, by name; one that cannot be imported is kept as a load failure.

    `of_one_run`: without tables about many runs, such as [campaign], whose models a single run need not load.
    """
    tables: dict[str, TableEntry] = {}
    for entry in plugins.registered(Kind.CONFIG_TABLE):
        if of_one_run and _traits(entry).starts_runs:
            continue
        model = _model(entry, plugins)
        if model is not None and entry.spec.name not in tables:
            tables[entry.spec.name] = _extended(entry, model, plugins)
    return tables


def read_config(
    file: Path | Mapping[str, Any] | None,
    plugins: Plugins,
    tables: Mapping[str, TableEntry],
    *,
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    settings: Sequence[Setting] = (),
) -> tuple[Config, list[Problem]]:
    """`load_config` with the recipes and the hints of these plugins; the secrets in it are hidden from then on.

    For a run's own `config.toml`, the run's copies of its code can be imported from then on, unless another module has
    that name: functions that were passed to `retrain.train` exist only there. Its paths, and a resumed run's, lead to
    their recorded places: see `Follower`.
    """
    if isinstance(file, Path) and (code := file.parent / COPIED_CODE).is_dir() and is_run(file.parent):
        sys.path += [folder for folder in (str(code.resolve()),) if folder not in sys.path]
    config, problems = load_config(
        file,
        tables=tables,
        arguments=arguments,
        environ=environ,
        table_hint=partial(table_hint, plugins),
        settings=settings,
        recipe=partial(_recipe_values, plugins, tables),
    )
    # The settings of a condition come after the campaign itself, whose tables are known by then.
    known = config.foreign_tables if settings else ()
    if records := records_of(file if isinstance(file, Path) else None, config.resume.from_):
        # A first run has no record to follow, and does not load its reader.
        from retrain.records.identity.recorded import Follower

        config, more = Follower(config, tables, plugins, records).follow()
        problems += more
    LEARNED.learn_config({name: table for name, table in config.as_dict().items() if name not in known})
    return config, about_recipe(problems, config, plugins)


def about_recipe(problems: Sequence[Problem], config: Config, plugins: Plugins) -> list[Problem]:
    """Return the same problems; those about a value of the recipe name the plugin it comes from."""
    if not config.algorithm.recipe:
        return list(problems)
    from retrain.credit.recipes import with_owner

    return with_owner(problems, config, plugins)


def _recipe_values(
    plugins: Plugins, tables: Mapping[str, TableEntry], given: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Setting], list[Problem]]:
    if not given.get("algorithm", {}).get("recipe"):
        return [], []
    from retrain.credit.recipes import recipe_values

    return recipe_values(plugins, tables, given)


def table_hint(plugins: Plugins, table: str) -> str:
    """Fix for a first-party table, or key in another's, that no plugin registered; empty for any other.

    For a table or a `table.key` of the public package it is its replacement.
    """
    from retrain.kernel.plugins.missing import way_to_get  # only a faulty configuration needs them
    from retrain.run.public_package import note_on

    if note := note_on(table):
        return note
    distribution = provider(Kind.CONFIG_TABLE, table)
    if distribution is None:
        return ""
    failed = f"the part of {distribution} that reads [{table}] is missing or failed to load: reinstall {distribution}"
    return way_to_get(distribution, plugins, if_installed=failed)


def _extended(base: Registered, model: type[BaseModel], plugins: Plugins) -> TableEntry:
    """The table with its extensions; when two plugins define one key, or its default, the first one counts."""
    table, traits = base.spec.name, _traits(base)
    key_owners = dict.fromkeys(model.model_fields, base.owner)
    default_owners = {name: base.owner for name, info in model.model_fields.items() if info.default}
    models, defaults, legacy_keys, problems = [model], dict[str, Any](), dict[str, str](), list[Problem]()
    for extension in plugins.registries[Kind.CONFIG_TABLE].extensions:
        if extension.spec.name != table:
            continue
        keys, supplied = _model(extension, plugins), _traits(extension).defaults
        clashes = {name: key_owners[name] for name in (keys.model_fields if keys else ()) if name in key_owners}
        clashes |= {f"{name}'s default": default_owners[name] for name in supplied if name in default_owners}
        if clashes:
            for name, owner in clashes.items():
                owners = " and ".join(f"{each} ({each.source})" for each in (owner, extension.owner))
                what = f"{name} is defined twice: by {owners}"
                fix = f"uninstall one, or leave one out with RETRAIN_BLOCK={extension.owner.distribution}"
                problems.append(Problem(code="plugin.clashing-keys", where=f"[{table}]", what=what, fix=fix))
            continue
        if keys is not None:
            key_owners |= dict.fromkeys(keys.model_fields, extension.owner)
            models.append(keys)
        default_owners |= dict.fromkeys(supplied, extension.owner)
        defaults |= supplied
        legacy_keys |= _traits(extension).legacy_keys
    return TableEntry(
        model=_merged(models, defaults, plugins),
        traits=replace(traits, legacy_keys=legacy_keys),
        problems=tuple(problems),
    )


def _merged(models: list[type[BaseModel]], defaults: Mapping[str, Any], plugins: Plugins) -> type[BaseModel]:
    fields: dict[str, Any] = {}
    for name, info in ((name, info) for model in models for name, info in model.model_fields.items()):
        description = info.description or ""
        if name in defaults or NAMES in description:
            extra: Any = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
            described = Field(description=description.replace(NAMES, _known_names(extra.get("names"), plugins)))
            fields[name] = (Annotated[info.annotation, info, described], defaults.get(name, info.default))
    base = models[0]
    if not fields and len(models) == 1:
        return base
    merged: type[BaseModel] = create_model(
        base.__name__, __base__=tuple(reversed(models)), __module__=base.__module__, __doc__=base.__doc__, **fields
    )
    return merged


def _known_names(kind: Kind | None, plugins: Plugins) -> str:
    """Return a kind's registered names, first-party first in documented order; without any, the documented ones."""
    if kind is None:
        return ""
    registered = [entry.spec.name for entry in plugins.registered(kind)]
    promised = [name for name in promised_names(kind) if name in registered or not registered]
    return ", ".join(dict.fromkeys([*promised, *registered]))


def _model(entry: Registered, plugins: Plugins) -> type[BaseModel] | None:
    try:
        model: type[BaseModel] | None = entry.spec.load()
    except Exception as error:
        # One plugin's faulty table must not take the others away.
        failure = LoadFailure(owner=entry.owner, error=f"table [{entry.spec.name}]: {type(error).__name__}: {error}")
        # Tables are collected more than once, and each failure is to be reported once.
        if failure not in plugins.failures:
            plugins.failures.append(failure)
        return None
    return model


def _traits(entry: Registered) -> TableTraits:
    return entry.spec.traits if isinstance(entry.spec.traits, TableTraits) else TableTraits()
