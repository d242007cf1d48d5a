"""Checks the names and parameters of a configuration against what is installed, without importing any part."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from retrain.kernel.config.keys import TableTraits, keys_of
from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import DEFAULT_ORIGIN, Config
from retrain.kernel.config.schema import PrimeRlOptions
from retrain.kernel.declared import Capabilities, EngineTraits, Kind
from retrain.kernel.errors import Problem
from retrain.kernel.plugins.first_party import install_line, provider
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.plugins.params import validated_params
from retrain.kernel.plugins.resolve import problem_with
from retrain.kernel.plugins.spec import LoadFailure

# Asked for by every run, so their defaults must resolve too; the parts of the credit flow are light and resolved whole.
ALWAYS = {"backend.backend": Kind.BACKEND, "data.source": Kind.DATA_SOURCE, "reward.type": Kind.REWARD}
CREDIT_KINDS = (Kind.ADVANTAGE, Kind.TRANSFORM, Kind.UNCERTAINTY, Kind.ALGORITHM)
DEFAULT_NAMES = {"reward.type": "match"}  # where the table's own distribution may be missing


def registered_tables(plugins: Plugins) -> dict[str, TableEntry]:
    """The config tables of all plugins, by name; one that cannot be imported is kept as a load failure."""
    tables: dict[str, TableEntry] = {}
    for entry in plugins.registered(Kind.CONFIG_TABLE):
        traits = entry.spec.traits if isinstance(entry.spec.traits, TableTraits) else TableTraits()
        try:
            tables.setdefault(entry.spec.name, TableEntry(model=entry.spec.load(), traits=traits))
        except Exception as error:  # a fault of that plugin alone
            failure = LoadFailure(
                owner=entry.owner, error=f"table [{entry.spec.name}]: {type(error).__name__}: {error}"
            )
            if failure not in plugins.failures:  # the tables are asked for more than once
                plugins.failures.append(failure)
    return tables


def table_hint(plugins: Plugins, table: str) -> str:
    """How to get a table of ours that nobody registered; empty for a stranger's."""
    distribution = provider(Kind.CONFIG_TABLE, table)
    if distribution is None:
        return ""
    if distribution in plugins.left_out:
        return f"{distribution} reads [{table}], but RETRAIN_PLUGINS or RETRAIN_BLOCK leaves it out: change that"
    installed = {entry.owner.distribution for kind in Kind for entry in plugins.registered(kind)}
    if distribution in installed:
        return f"the part of {distribution} that reads [{table}] is missing or failed to load: reinstall {distribution}"
    return f"{install_line(distribution)}  (it reads [{table}])"


def wanted_names(config: Config, tables: Mapping[str, TableEntry]) -> dict[str, tuple[Kind, str]]:
    """Kind and name of each part that the configuration asks for, by its key, except those of the credit flow."""
    wanted: dict[str, tuple[Kind, str]] = {}
    for path, kind in ALWAYS.items():
        wanted[path] = (kind, config.value(path, DEFAULT_NAMES.get(path, "")))
    for table, entry in tables.items():
        for key in keys_of(table, entry.model, entry.traits):
            value = config.value(key.path, "")
            named = value or key.default  # empty is a choice only where the default is empty too
            if key.names and key.names not in CREDIT_KINDS and named and config.origin(key.path) != DEFAULT_ORIGIN:
                for name in [value] if isinstance(value, str) else value:  # a text, or names with their weights
                    wanted[key.path if name is value else f"{key.path} {name}"] = (key.names, name)
    for name in config.logging.recorders:
        wanted[f"logging.recorders {name}"] = (Kind.RECORDER, name)
    for name in config.value("health.monitors", []):
        wanted[f"health.monitors {name}"] = (Kind.HEALTH_MONITOR, name)
    return wanted


def check_names(config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]) -> list[Problem]:
    """Every name in the configuration that nobody provides, except those of the credit flow."""
    wanted = wanted_names(config, tables)
    for table in {path.partition(".")[0] for path in config.origins}:
        wanted[f"{table}."] = (Kind.CONFIG_TABLE, table)  # two owners of one table
    search_paths = config.plugins.search_paths
    found = [
        problem_with(plugins, kind, name, where=_place(config, path), search_paths=search_paths)
        for path, (kind, name) in wanted.items()
    ]
    return [problem for problem in found if problem is not None]


def _place(config: Config, path: str) -> str:
    """Place of a key, or of one name in a key that holds several: `reward.weights math`."""
    key, _, entry = path.partition(" ")
    return f"{config.place(key)} {entry}".rstrip()


def check_options(config: Config, plugins: Plugins) -> list[Problem]:
    """Problems with `[backend.options]` and `[data.options]`, by the models that backend and source declared."""
    problems = []
    foreign = set(config.backend.options) - set(backend_options(config))
    for name in sorted(foreign):
        default = PrimeRlOptions.model_fields[name].default
        if config.backend.options[name] != default:
            where = f"{config.place('backend.options')}.{name}"
            what = f"belongs to backend 'prime_rl', not to {config.backend.backend!r}"
            problems.append(Problem(where=where, what=what, fix="remove it, or keep the default " + repr(default)))
    for kind, name, path, options in (
        (Kind.BACKEND, config.backend.backend, "backend.options", backend_options(config)),
        (Kind.DATA_SOURCE, config.data.source, "data.options", config.data.options),
    ):
        entries = plugins.find(kind, name)
        try:
            model = entries[0].spec.load_params() if len(entries) == 1 else None
        except Exception as error:  # a fault of that plugin, told with its owner
            what = f"the parameters of {kind} {name!r} failed to load: {type(error).__name__}: {error}"
            fix = f"repair or reinstall {entries[0].owner.distribution}"
            problems.append(Problem(where=config.place(path), what=what, fix=fix))
            continue
        problems += validated_params(model, options, where=config.place(path))[1]
    return problems


def declared_capabilities(config: Config, plugins: Plugins) -> Capabilities | None:
    """What the configured backend promises with the configured engine, before either is imported; None = nothing."""
    entries = plugins.find(Kind.BACKEND, config.backend.backend)
    capabilities = entries[0].spec.traits if entries else None
    if not isinstance(capabilities, Capabilities):
        return None
    engines = plugins.find(Kind.INFERENCE_ENGINE, config.value("inference.engine", ""))
    traits = engines[0].spec.traits if engines else None
    return traits.limit(capabilities) if isinstance(traits, EngineTraits) else capabilities


def backend_options(config: Config) -> dict[str, Any]:
    """`[backend.options]` without prime_rl's keys when another backend is chosen.

    The documented full configuration carries them at their defaults, whatever the backend; other values are refused.
    """
    options = config.backend.options
    if config.backend.backend == "prime_rl":
        return dict(options)
    return {name: value for name, value in options.items() if name not in PrimeRlOptions.model_fields}
