"""The suites of parts that are used before a run: config tables, recipes, `init` templates and commands."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from typing import Any

import click
import tomli_w
from click.testing import CliRunner, Result
from pydantic import BaseModel, ValidationError

from retrain.credit.flow import build_flow
from retrain.credit.recipes import Recipe, find_recipe
from retrain.kernel.config.keys import keys_of
from retrain.kernel.config.load import all_keys
from retrain.kernel.config.resolved import Config, Layer
from retrain.kernel.errors import EXIT_DONE, EXIT_USAGE, ConfigError
from retrain.records.manifest import config_toml
from retrain.run.check import check
from retrain.run.tables import read_config, registered_tables
from retrain.testing.bench import Bench
from retrain.testing.check import expect, fail

UNKNOWN_KEY = "no_such_key_of_this_table"
UNKNOWN_FLAG = "--no-such-flag-of-this-command"


def is_a_strict_model(bench: Bench) -> None:
    """It is a pydantic model that refuses unknown keys."""
    model = _model(bench)
    try:
        model.model_validate({UNKNOWN_KEY: 1})
    except ValidationError:
        return
    why = "a misspelt key would be ignored, and two runs that should differ would be the same"
    fix = "derive it from retrain.api.Table"
    fail(f"{model.__name__} accepts the unknown key {UNKNOWN_KEY!r}", why=why, fix=fix)


def has_defaults(bench: Bench) -> None:
    """Every key has a default, and the defaults are valid and can be written as TOML and read back."""
    model = _model(bench)
    defaults = model()
    plain = defaults.model_dump(mode="json", by_alias=True, exclude_none=True)
    expect(
        model.model_validate(tomllib.loads(tomli_w.dumps(plain))) == defaults,
        "the defaults read back from TOML differ",
        why="every run records its configuration, and a resume reads it",
        fix="use types that TOML has: text, numbers, booleans, lists, tables",
    )


def explains_its_keys(bench: Bench) -> None:
    """Every key has a description."""
    bare = [key.path for key in keys_of(bench.name, _model(bench)) if not key.description.strip()]
    why = "`retrain explain --keys`, the manual, the schema and error messages show it"
    fix = 'write retrain.api.key(default, "description")'
    expect(not bare, f"no description of {', '.join(bare)}", why=why, fix=fix)


def has_flags_of_its_own(bench: Bench) -> None:
    """The command-line flags of its keys clash with no key of another table."""
    flags: dict[str, str] = {}
    for key in all_keys(registered_tables(bench.plugins)):
        first = flags.setdefault(key.flag, key.path)
        expect(
            first == key.path or bench.name not in (first.partition(".")[0], key.table),
            f"--{key.flag} is {first} and {key.path}",
            why="a flag must mean one key",
            fix='give the table a separate prefix: TableTraits(flag_prefix="mine_")',
        )


def _model(bench: Bench) -> type[BaseModel]:
    model: Any = bench.found.target
    why, fix = "the table is read through it", "register a subclass of retrain.api.Table"
    expect(isinstance(model, type) and issubclass(model, BaseModel), f"the factory is {model!r:.100}", why=why, fix=fix)
    return model  # type: ignore[no-any-return]


CONFIG_TABLE = (is_a_strict_model, has_defaults, explains_its_keys, has_flags_of_its_own)


def is_a_valid_configuration(bench: Bench) -> None:
    """As the only content of a file, it gives a configuration without problems: every key, value and name exists."""
    values = _with_recipe(bench).as_dict()
    for path, value in _recipe(bench).values.items():
        table, _, name = path.partition(".")
        expect(
            values[table][name] == value,
            f"it sets {path} = {value!r}, and the run has {values[table][name]!r}",
            why="the run would not follow the recipe that it is named after",
            fix="write the value as TOML would have it",
        )


def says_where_its_values_come_from(bench: Bench) -> None:
    """`retrain explain` shows each of its values with the recipe as its origin."""
    config = _with_recipe(bench)
    for path in _recipe(bench).values:
        why, fix = "a user must see which values the recipe chose", "register a mapping of table.key to value"
        expect(config.origin(path).layer is Layer.RECIPE, f"{path} comes from {config.origin(path)}", why=why, fix=fix)


def gives_way_to_the_user(bench: Bench) -> None:
    """A key that the user sets keeps the user's value, and the run's label shows it."""
    recipe, plain = _recipe(bench), _with_recipe(bench).as_dict()
    for key in all_keys(registered_tables(bench.plugins)):
        value = key.default
        # Only keys whose default differs from the recipe's value: otherwise nothing shows which of the two won.
        if key.path not in recipe.values or isinstance(value, dict) or value in (None, "", plain[key.table][key.name]):
            continue
        # Not checked further: the default may not go with the rest of the recipe.
        config = bench.read(bench.smallest_document(), {key.table: {key.name: value}})
        expect(
            config.as_dict()[key.table][key.name] == value and config.origin(key.path).layer is Layer.FILE,
            f"{key.path} = {value!r} of the file is lost",
            why="a key that the user sets overrides the recipe",
            fix="register a plain mapping",
        )
        label = build_flow(config, bench.plugins).condition
        expect(
            label.startswith(f"{recipe.name}~") and f"{key.flag.replace('-', '_')}=" in label,
            f"the label {label!r} does not show that {key.path} was set",
            why="runs of two settings would be compared as one condition",
            fix="register the values as TOML has them",
        )


def runs_again_from_its_records(bench: Bench) -> None:
    """The `config.toml` of a run holds the recipe's name and every value, and gives the same values and label."""
    first = _with_recipe(bench)
    again = _with_recipe(bench, **tomllib.loads(config_toml(first, seed=first.training.seed)))
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
    why, fix = "a run would carry its name and be the default one", "set at least one key"
    expect(recipe.values, "it sets no key", why=why, fix=fix)
    return recipe


def _with_recipe(bench: Bench, **more: Mapping[str, Any]) -> Config:
    """Return the configuration of the recipe, in which little is set except `more`."""
    config = bench.read(bench.smallest_document(), more)
    if problems := check(config, bench.plugins, registered_tables(bench.plugins))[1]:
        raise ConfigError(*problems)
    return config


RECIPE = (is_a_valid_configuration, says_where_its_values_come_from, gives_way_to_the_user, runs_again_from_its_records)


def is_toml(bench: Bench) -> None:
    """The factory is a text, or a function that returns one, and the text is TOML."""
    try:
        tomllib.loads(_text(bench))
    except tomllib.TOMLDecodeError as error:
        fail(f"not valid TOML: {error}", why="`retrain init` writes it unchanged", fix="correct that line")


def is_a_valid_template(bench: Bench) -> None:
    """Every table, key, value and name in it is valid with the plugins installed here."""
    file = bench.folder / "retrain.toml"
    file.write_text(_text(bench), encoding="utf-8")
    tables = registered_tables(bench.plugins)
    config, problems = read_config(file, bench.plugins, tables)
    problems += check(config, bench.plugins, tables)[1]
    if problems:
        raise ConfigError(*problems)


def has_comments(bench: Bench) -> None:
    """It has comments, because users read a template before they change it."""
    why, fix = "a new user learns the keys from it", "explain in a comment the keys that a user would change first"
    expect(any("#" in line for line in _text(bench).splitlines()), "it has no comment", why=why, fix=fix)


def _text(bench: Bench) -> str:
    target = bench.found.target
    text = target() if callable(target) else target
    why, fix = "`retrain init --template NAME` writes it to a file", "register the text of a TOML file"
    expect(isinstance(text, str) and text.strip(), f"it is {text!r:.100}", why=why, fix=fix)
    return str(text)


TEMPLATE = (is_toml, is_a_valid_template, has_comments)


def is_a_click_command(bench: Bench) -> None:
    """The factory is a `click.Command`."""
    command = bench.found.target
    why = "`retrain NAME ...` hands the arguments to it"
    fix = "decorate the function with @click.command() and register it, not its result"
    expect(isinstance(command, click.Command), f"the factory is {type(command).__name__}", why=why, fix=fix)


def explains_itself(bench: Bench) -> None:
    """`retrain NAME --help` describes the command and exits with 0."""
    outcome = _invoke(bench, "--help")
    expect(
        outcome.exit_code == EXIT_DONE and (bench.found.target.help or "").strip(),
        f"--help ended with {outcome.exit_code}: {outcome.output[-300:]}{outcome.exception or ''}".strip(),
        why="this is where a user looks first",
        fix="give the function a docstring",
    )


def documents_its_options(bench: Bench) -> None:
    """Every option has a help text."""
    bare = [
        "/".join(option.opts)
        for option in bench.found.target.params
        if isinstance(option, click.Option) and not option.hidden and not (option.help or "").strip()
    ]
    why, fix = "`--help` and the manual show it", 'give click.option(..., help="...")'
    expect(not bare, f"no help for {', '.join(bare)}", why=why, fix=fix)


def refuses_unknown_flags(bench: Bench) -> None:
    """A misspelt flag is a usage error, unless the command passes its arguments on."""
    command = bench.found.target
    passes_on = any(command.context_settings.get(name) for name in ("ignore_unknown_options", "allow_extra_args"))
    if isinstance(command, click.Group) or passes_on:
        return
    outcome = _invoke(bench, UNKNOWN_FLAG)
    why, fix = "a misspelt flag must not be ignored", "let click parse the arguments"
    expect(outcome.exit_code == EXIT_USAGE, f"{UNKNOWN_FLAG} ended with {outcome.exit_code}", why=why, fix=fix)


def _invoke(bench: Bench, argument: str) -> Result:
    """Call the command as `retrain` does; click keeps the first help names that a process gives it."""
    names = ["-h", "--help"]
    return CliRunner().invoke(bench.found.target, [argument], obj=bench.plugins, help_option_names=names)


COMMAND = (is_a_click_command, explains_itself, documents_its_options, refuses_unknown_flags)
