"""Turns a command line into a validated configuration: file, overrides, every problem at once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.credit.flow import CreditFlow
from retrain.kernel.config.keys import Key
from retrain.kernel.config.load import Setting, TableEntry, all_keys
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.toml_file import read_toml
from retrain.kernel.declared import ConfigClaim
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.registry import Plugins
from retrain.records.record_names import CONFIG_FILE
from retrain.run.check import check, check_run
from retrain.run.tables import read_config, registered_tables
from retrain.text.secrets import hide_arguments

DEFAULT_FILE = Path("retrain.toml")
MODEL, TASKS = "--model", {"--data-source", "--environment-provider"}
RESUMES = {"--resume", "--resume-from"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Checked:
    """A configuration without problems, its credit flow, and the keys of the tables that it was checked against."""

    config: Config
    flow: CreditFlow
    keys: list[Key]
    tables: Mapping[str, TableEntry]


def load_checked(
    arguments: Sequence[str], plugins: Plugins, *, starts_run: bool = False, will_run: bool = True
) -> Checked:
    """Resolve `[CONFIG] [overrides]`. ConfigError lists every problem found, before any heavy import.

    `starts_run`: the parts of credit are tried too. Not `will_run`: libraries that only a run needs may be missing.
    """
    return load_file(*split_arguments(arguments), plugins, starts_run=starts_run, will_run=will_run)


def load_file(
    file: Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    plugins: Plugins,
    *,
    starts_run: bool = False,
    will_run: bool = True,
    settings: Sequence[Setting] = (),
) -> Checked:
    """Load as `load_checked` does, from this file or its tables (None: the defaults); `settings` override all."""
    tables = registered_tables(plugins, of_one_run=starts_run)
    config, flow, problems = _load(file, overrides, plugins, tables, settings, will_run=will_run)
    if starts_run and problems:
        # A table or flag may be unknown only because it belongs to a campaign.
        tables = registered_tables(plugins)
        config, flow, problems = _load(file, overrides, plugins, tables, settings, will_run=will_run)
    if starts_run and flow is not None:
        problems += check_run(config, plugins, flow)
    if problems or flow is None:
        raise ConfigError(*problems)
    return Checked(config=config, flow=flow, keys=all_keys(tables), tables=tables)


def load_with_problems(arguments: Sequence[str], plugins: Plugins) -> tuple[Config, CreditFlow | None, list[Problem]]:
    """Load without raising: return the config (defaults where it is faulty), the flow if any, and the problems."""
    return _load(*split_arguments(arguments), plugins, registered_tables(plugins))


def _load(
    file: Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    plugins: Plugins,
    tables: Mapping[str, TableEntry],
    settings: Sequence[Setting] = (),
    *,
    will_run: bool = True,
) -> tuple[Config, CreditFlow | None, list[Problem]]:
    config, problems = read_config(file, plugins, tables, arguments=overrides, environ=os.environ, settings=settings)
    flow, more = check(config, plugins, tables, will_run=will_run)
    return config, flow, [*problems, *more]


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Split a command line into the configuration file and the overrides.

    Without a file: with `--resume DIR` the resumed run's own `config.toml`, otherwise `./retrain.toml`, otherwise the
    defaults, provided that overrides are given.
    """
    rest = list(arguments)
    if rest and not rest[0].startswith("-"):
        return Path(rest.pop(0)), rest
    resumed = _value_of("--resume", rest) or _value_of("--resume-from", rest)
    # `Path.is_file` raises where it may not look.
    if resumed and os.path.isfile(Path(resumed) / CONFIG_FILE):
        return Path(resumed) / CONFIG_FILE, rest
    if DEFAULT_FILE.is_file():
        return DEFAULT_FILE, rest
    if rest:
        return None, rest
    raise ConfigError(_no_configuration(rest))


def refuse_defaults(config: Config, overrides: Sequence[str]) -> None:
    if problem := missing_file(config, overrides):
        raise ConfigError(problem)


def missing_file(config: Config, overrides: Sequence[str]) -> Problem | None:
    """The problem with a run of this configuration if neither a file nor a flag names its model and tasks."""
    flags = {word.partition("=")[0] for word in overrides}
    is_named = config.source or flags & RESUMES or (MODEL in flags and flags & TASKS)
    return None if is_named else _no_configuration(overrides)


def _no_configuration(overrides: Sequence[str]) -> Problem:
    typed = shlex.join(["retrain", "my.toml", *hide_arguments(overrides)])
    fix = f"write one with `retrain init --template tiny`, or give a path: `{typed}`"
    why = f"flags are enough only if they name a model and tasks: {MODEL} and --data-source" if overrides else ""
    what = "no configuration in this folder"
    return Problem(code="config.no-file", where=str(DEFAULT_FILE), what=what, why=why, fix=fix)


def claim_of(arguments: Sequence[str], plugins: Plugins) -> ConfigClaim | None:
    """The plugin's claim on the file that the command line names; None when the file is for training.

    A missing or unreadable file is left to training, where its fault is reported.
    """
    try:
        file, _ = split_arguments(arguments)
        document = read_toml(file)[0] if file else {}
    except ConfigError:
        return None
    claim: ConfigClaim | None = plugins.notify("retrain_claim_config", document=document)
    return claim


def _value_of(flag: str, words: Sequence[str]) -> str:
    for index, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and index + 1 < len(words):
            return words[index + 1]
    return ""
