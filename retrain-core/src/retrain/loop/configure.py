"""From a command line to a configuration that is known to be sound: file, overrides, every problem at once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from retrain.config.load import load_config
from retrain.config.resolved import Config
from retrain.credit.flow import CreditFlow
from retrain.errors import ConfigError, Problem
from retrain.loop.assemble import check
from retrain.plugins.check import registered_tables, table_hint
from retrain.plugins.manager import Plugins

DEFAULT_FILE = Path("retrain.toml")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A configuration without problems, and its credit flow."""

    config: Config
    flow: CreditFlow


def load_checked(arguments: Sequence[str], plugins: Plugins) -> Checked:
    """Resolve `[CONFIG] [overrides]`. ConfigError lists every problem found, before any heavy import."""
    config, flow, problems = load_with_problems(arguments, plugins)
    if problems or flow is None:
        raise ConfigError(*problems)
    return Checked(config=config, flow=flow)


def load_with_problems(arguments: Sequence[str], plugins: Plugins) -> tuple[Config, CreditFlow | None, list[Problem]]:
    """The same for who wants to show the problems: the config (defaults where it is faulty), the flow if any."""
    file, overrides = split_arguments(arguments)
    tables = registered_tables(plugins)
    config, problems = load_config(file, tables=tables, arguments=overrides, environ=os.environ, table_hint=table_hint)
    flow, more = check(config, plugins, tables)
    return config, flow, [*problems, *more]


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The configuration file and the overrides.

    Without a file: `./retrain.toml`, or the defaults if there is none but overrides are given.
    """
    rest = list(arguments)
    if rest and not rest[0].startswith("-"):
        return Path(rest.pop(0)), rest
    if DEFAULT_FILE.is_file():
        return DEFAULT_FILE, rest
    if rest:
        return None, rest
    fix = "write one with `retrain init --template tiny`, or give a path: `retrain my.toml`"
    raise ConfigError(Problem(where=str(DEFAULT_FILE), what="no configuration in this folder", fix=fix))
