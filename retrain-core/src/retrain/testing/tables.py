"""What a config table must be: a strict model with valid defaults and a description of every key."""

from __future__ import annotations

import tomllib
from typing import Any

import tomli_w
from pydantic import BaseModel, ValidationError

from retrain.kernel.config.keys import keys_of
from retrain.kernel.config.load import all_keys
from retrain.kernel.declared import TableTraits
from retrain.run.tables import registered_tables
from retrain.testing.bench import Bench
from retrain.testing.check import expect

UNKNOWN_KEY = "no_such_key_of_this_table"


def is_a_strict_model(bench: Bench) -> None:
    """It is a pydantic model that refuses unknown keys."""
    model = _model(bench)
    try:
        model.model_validate({UNKNOWN_KEY: 1})
    except ValidationError:
        return
    expect(
        False,
        f"{model.__name__} accepts the unknown key {UNKNOWN_KEY!r}",
        why="a misspelt key would be ignored, and two runs that should differ would be the same",
        fix="derive it from retrain.api.Table",
    )


def has_defaults(bench: Bench) -> None:
    """Every key has a default, and the defaults are valid and can be written as TOML and read back."""
    model = _model(bench)
    defaults = model()
    plain = defaults.model_dump(mode="json", by_alias=True, exclude_none=True)
    again = model.model_validate(tomllib.loads(tomli_w.dumps(plain)))
    expect(
        again == defaults,
        "the defaults read back from TOML are others",
        why="every run writes its configuration down, and a resume reads it",
        fix="use types that TOML has: text, numbers, booleans, lists, tables",
    )


def explains_its_keys(bench: Bench) -> None:
    """Every key has a description."""
    bare = [key.path for key in keys_of(bench.name, _model(bench), _traits(bench)) if not key.description.strip()]
    expect(
        not bare,
        f"no description of {', '.join(bare)}",
        why="`retrain explain --keys`, the manual, the schema and error messages show it",
        fix='write retrain.api.key(default, "what it does")',
    )


def has_flags_of_its_own(bench: Bench) -> None:
    """The command-line flags of its keys clash with no key of another table."""
    flags: dict[str, str] = {}
    for key in all_keys(registered_tables(bench.plugins)):
        first = flags.setdefault(key.flag, key.path)
        expect(
            first == key.path or bench.name not in (first.partition(".")[0], key.table),
            f"--{key.flag} is {first} and {key.path}",
            why="a flag must mean one key",
            fix='give the table a prefix of its own: TableTraits(flag_prefix="mine_")',
        )


def _model(bench: Bench) -> type[BaseModel]:
    model: Any = bench.found.target
    expect(
        isinstance(model, type) and issubclass(model, BaseModel),
        f"the factory is {model!r:.100}",
        why="the table is read through it",
        fix="register a subclass of retrain.api.Table",
    )
    return model  # type: ignore[no-any-return]


def _traits(bench: Bench) -> TableTraits:
    return bench.found.traits if isinstance(bench.found.traits, TableTraits) else TableTraits()


CONFIG_TABLE = (is_a_strict_model, has_defaults, explains_its_keys, has_flags_of_its_own)
