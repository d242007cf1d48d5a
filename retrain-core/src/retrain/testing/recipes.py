"""What a recipe must be: values of keys that exist, which make a valid configuration and give way to the user."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import tomli_w

from retrain.credit.flow import build_flow
from retrain.credit.recipes import Recipe, find_recipe
from retrain.kernel.config.load import all_keys
from retrain.kernel.config.resolved import Config, Layer
from retrain.kernel.errors import ConfigError
from retrain.records.manifest import config_toml
from retrain.run.check import check
from retrain.run.tables import read_config, registered_tables
from retrain.testing.bench import FILE, Bench
from retrain.testing.check import expect
from retrain.testing.tokens import toy_model


def is_a_valid_configuration(bench: Bench) -> None:
    """Alone in a file, it gives a configuration without problems: every key, value and name in it exists."""
    config = _alone(bench)
    values = config.as_dict()
    for path, value in _recipe(bench).values.items():
        table, _, name = path.partition(".")
        expect(
            values[table][name] == value,
            f"it says {path} = {value!r}, and the run has {values[table][name]!r}",
            why="the run would not be what the recipe's name says",
            fix="write the value as TOML would have it",
        )


def says_where_its_values_come_from(bench: Bench) -> None:
    """`retrain explain` shows each of its values with the recipe as its origin."""
    config = _alone(bench)
    for path in _recipe(bench).values:
        expect(
            config.origin(path).layer is Layer.RECIPE,
            f"{path} comes from {config.origin(path)}",
            why="a user must see which values the recipe chose",
            fix="register a mapping of table.key to value",
        )


def gives_way_to_the_user(bench: Bench) -> None:
    """A key that the user sets keeps the user's value, and the run's label shows it."""
    plain = _alone(bench)
    for key in all_keys(registered_tables(bench.plugins)):
        if key.path not in _recipe(bench).values or isinstance(key.default, dict):
            continue
        value = key.default
        if value in (None, "") or plain.as_dict()[key.table][key.name] == value:
            continue
        config = _read(bench, {key.table: {key.name: value}})
        expect(
            config.as_dict()[key.table][key.name] == value and config.origin(key.path).layer is Layer.FILE,
            f"{key.path} = {value!r} of the file is lost",
            why="any key that is set beats the recipe",
            fix="register a plain mapping",
        )
        label = build_flow(config, bench.plugins).condition
        expect(
            label.startswith(f"{_recipe(bench).name}~") and key.name in label,
            f"the label {label!r} does not show that {key.path} was set",
            why="runs of two settings would be compared as one condition",
            fix="register the values as TOML has them",
        )


def runs_again_from_its_records(bench: Bench) -> None:
    """The `config.toml` of a run, which holds the recipe's name and every value, gives the same values and label."""
    first = _alone(bench)
    again = _read(bench, tomllib.loads(config_toml(first, seed=first.training.seed)))
    expect(
        again.as_dict() == first.as_dict(),
        "the resolved configuration, read again, has other values",
        why="a resume and a repetition read config.toml",
        fix="use values that TOML has: text, numbers, booleans, lists, tables",
    )
    name = _recipe(bench).name
    labels = [build_flow(config, bench.plugins).condition for config in (first, again)]
    expect(
        labels == [name, name],
        f"the labels are {labels[0]!r} and, from config.toml, {labels[1]!r}",
        why="a run and its repetition would be two conditions, or a run would seem to depart from its recipe",
        fix="use values that TOML has: lists, not tuples",
    )


def _recipe(bench: Bench) -> Recipe:
    recipe = find_recipe(bench.plugins, bench.name, where="conformance()", search_paths=["plugins"])
    expect(
        bool(recipe.values),
        "it sets no key",
        why="a run would carry its name and be the default one",
        fix="set at least one key",
    )
    return recipe


def _alone(bench: Bench) -> Config:
    """A configuration that sets little more than the recipe."""
    return _read(bench, {})


def _read(bench: Bench, more: Mapping[str, Mapping[str, Any]]) -> Config:
    document: dict[str, dict[str, Any]] = {
        "model": {"model": toy_model(bench.plugins)},
        "backend": {"devices": "cpu"},
        "algorithm": {"recipe": bench.name},
    }
    for layer in (bench.given, more):
        for table, content in layer.items():
            document.setdefault(table, {}).update(content)
    file = bench.folder / FILE
    file.write_text(tomli_w.dumps(document), encoding="utf-8")
    tables = registered_tables(bench.plugins)
    config, problems = read_config(file, bench.plugins, tables)
    problems += check(config, bench.plugins, tables)[1]
    if problems:
        raise ConfigError(*problems)
    return config


RECIPE = (
    is_a_valid_configuration,
    says_where_its_values_come_from,
    gives_way_to_the_user,
    runs_again_from_its_records,
)
