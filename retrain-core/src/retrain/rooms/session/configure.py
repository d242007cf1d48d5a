"""Turns a command line into a validated configuration: file, overrides, every problem at once."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.kernel.config.keys import Key
from retrain.kernel.config.load import Setting, TableEntry, all_keys
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.toml_file import read_toml
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.plugins.spec import ConfigClaim
from retrain.rooms.credit.flow import CreditFlow
from retrain.rooms.session.assemble import check, check_run
from retrain.rooms.session.check import read_config, registered_tables

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
    arguments: Sequence[str],
    plugins: Plugins,
    *,
    starts_run: bool = False,
    will_run: bool = True,
    needs_file: bool = True,
) -> Checked:
    """Resolve `[CONFIG] [overrides]`. ConfigError lists every problem found, before any heavy import.

    `starts_run`: the parts of credit are tried too. Not `will_run`: libraries that only a run needs may be missing.
    `needs_file`: overrides without a file have to name a model and tasks, so that no default is fetched unasked.
    """
    file, overrides = split_arguments(arguments)
    unnamed = needs_file and file is None and not _names_a_run(overrides)
    return load_file(
        file,
        overrides,
        plugins,
        starts_run=starts_run,
        will_run=will_run,
        else_refused=(_no_configuration(overrides),) if unnamed else (),
    )


def load_file(
    file: Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    plugins: Plugins,
    *,
    starts_run: bool = False,
    will_run: bool = True,
    settings: Sequence[Setting] = (),
    else_refused: Sequence[Problem] = (),
) -> Checked:
    """As `load_checked`, of this file or its tables, or of the defaults where it is None; `settings` override all.

    `else_refused` are problems with a configuration that has no others.
    """
    tables = registered_tables(plugins)
    config, flow, problems = _load(file, overrides, plugins, tables, settings, will_run=will_run)
    if else_refused and not problems:
        raise ConfigError(*else_refused)
    if starts_run and flow is not None:
        problems += check_run(config, plugins, flow)
    if problems or flow is None:
        raise ConfigError(*problems)
    return Checked(config=config, flow=flow, keys=all_keys(tables), tables=tables)


def load_with_problems(arguments: Sequence[str], plugins: Plugins) -> tuple[Config, CreditFlow | None, list[Problem]]:
    """As `load_checked`, but return the problems too: the config (defaults where it is faulty), the flow if any."""
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
    """The configuration file and the overrides.

    Without a file: with `--resume DIR` the resumed run's own `config.toml`, else `./retrain.toml`, else the defaults,
    provided that overrides are given.
    """
    rest = list(arguments)
    if rest and not rest[0].startswith("-"):
        return Path(rest.pop(0)), rest
    resumed = _value_of("--resume", rest) or _value_of("--resume-from", rest)
    if resumed and os.path.isfile(Path(resumed) / "config.toml"):  # is_file would raise where it may not look
        return Path(resumed) / "config.toml", rest
    if DEFAULT_FILE.is_file():
        return DEFAULT_FILE, rest
    if rest:
        return None, rest
    raise ConfigError(_no_configuration(rest))


def claim_of(arguments: Sequence[str], plugins: Plugins) -> ConfigClaim | None:
    """The plugin's claim on the file that the command line names; None when the file is for training.

    A missing or unreadable file is left to training, which reports what is wrong with it.
    """
    try:
        file, _ = split_arguments(arguments)
        document = read_toml(file)[0] if file else {}
    except ConfigError:
        return None
    claim: ConfigClaim | None = plugins.notify("retrain_claim_config", document=document)
    return claim


def _names_a_run(overrides: Sequence[str]) -> bool:
    """True if the flags name a run to resume, or a model and its tasks."""
    flags = {word.partition("=")[0] for word in overrides}
    return bool(flags & RESUMES) or (MODEL in flags and bool(flags & TASKS))


def _no_configuration(overrides: Sequence[str]) -> Problem:
    typed = shlex.join(["retrain", "my.toml", *overrides])
    fix = f"write one with `retrain init --template tiny`, or give a path: `{typed}`"
    why = f"flags are enough only if they name a model and tasks: {MODEL} and --data-source" if overrides else ""
    return Problem(where=str(DEFAULT_FILE), what="no configuration in this folder", why=why, fix=fix)


def _value_of(flag: str, words: Sequence[str]) -> str:
    for index, word in enumerate(words):
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
        if word == flag and index + 1 < len(words):
            return words[index + 1]
    return ""
