"""What an `init` template must be: a TOML file that is a valid configuration without changes."""

from __future__ import annotations

import tomllib

from retrain.kernel.errors import ConfigError
from retrain.run.check import check
from retrain.run.tables import read_config, registered_tables
from retrain.testing.bench import Bench
from retrain.testing.check import expect


def is_toml(bench: Bench) -> None:
    """The factory is a text, or a function that returns one, and the text is TOML."""
    try:
        tomllib.loads(_text(bench))
    except tomllib.TOMLDecodeError as error:
        expect(False, f"not valid TOML: {error}", why="`retrain init` writes it unchanged", fix="correct that line")


def is_a_valid_configuration(bench: Bench) -> None:
    """Every table, key, value and name in it is valid with the plugins installed here."""
    file = bench.folder / "retrain.toml"
    file.write_text(_text(bench), encoding="utf-8")
    tables = registered_tables(bench.plugins)
    config, problems = read_config(file, bench.plugins, tables)
    _, more = check(config, bench.plugins, tables)
    if problems or more:
        raise ConfigError(*problems, *more)


def explains_itself(bench: Bench) -> None:
    """It has comments, because users read a template before they change it."""
    expect(
        any("#" in line for line in _text(bench).splitlines()),
        "it has no comment",
        why="a new user learns the keys from it",
        fix="say in a comment what the keys do that one would change first",
    )


def _text(bench: Bench) -> str:
    target = bench.found.target
    text = target() if callable(target) else target
    expect(
        isinstance(text, str) and bool(text.strip()),
        f"it is {text!r:.100}",
        why="`retrain init --template NAME` writes it to a file",
        fix="register the text of a TOML file",
    )
    return str(text)


TEMPLATE = (is_toml, is_a_valid_configuration, explains_itself)
