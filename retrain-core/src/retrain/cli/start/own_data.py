"""From a model, a data set and a reward as a user names them to the settings of a run."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.cli.start.find_columns import Columns, find_columns
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.declared import Kind
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.plugins.build import build_part
from retrain.kernel.plugins.resolve import resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.run.check import read_config, registered_tables

FILES, HUB = "files", "hub"  # the sources that read any table
PREVIEWED = 200  # rows that are looked at for the columns
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
SPLIT_NAME = re.compile(r"(?<![a-z])(train|training|test|validation|valid|val|dev)(?![a-z])", re.IGNORECASE)
TABULAR = (".jsonl", ".ndjson", ".json", ".csv", ".parquet")
CUSTOM, CODE, JUDGE = "custom", "code", "judge"
ASK_FOR_PROGRAM = "Put your whole program into one ```python block."


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """What the user asked for; an empty text leaves the choice to us, 0 steps too."""

    model: str = ""
    data: str = ""
    reward: str = ""
    prompt_key: str = ""
    answer_key: str = ""
    subset: str = ""
    split: str = ""
    revision: str = ""
    steps: int = 0
    log_dir: str = ""


@dataclass(slots=True, kw_only=True)
class DataChoice:
    """The settings of `[data]`, and what the user should know about them."""

    settings: dict[str, Any]
    told: list[str] = field(default_factory=list)
    tests: str = ""  # the column of a program's tests
    reward: str = ""  # that suits it; empty where the source brings its own verifier, or any may do


def choose_data(wishes: Wishes, plugins: Plugins) -> DataChoice:
    """The source that reads what `--data` names, with its columns; ConfigError when that cannot be told.

    A name of a source (`math`), alone, with the value of the one option that it must have (`reasoning_gym:chain_sum`)
    or with a local copy (`gsm8k:./gsm8k`); else a file, folder or pattern; else the id of a data set of the hub.
    """
    name, _, value = wishes.data.partition(":")
    if plugins.find(Kind.DATA_SOURCE, name) and name not in (FILES, HUB):
        is_copy = bool(value) and Path(value).expanduser().exists()
        required = {} if is_copy else _required(plugins, name, value)
        copy = {"path": value} if is_copy else {}
        choice = DataChoice(settings={"source": name, **copy, **_options(wishes, required)})
    else:
        choice = DataChoice(settings=_path_settings(wishes))
        columns = _columns(choice.settings, wishes, plugins)
        keys = {"prompt_key": columns.prompt, "answer_key": columns.answer}
        choice.settings |= {key: column for key, column in keys.items() if column}
        if columns.options:
            choice.settings["options"] = {**choice.settings.get("options", {}), **columns.options}
        choice.told += columns.told
        choice.reward = "math" if columns.has_formulas else "match"
        choice.tests = columns.tests
        if choice.tests:
            choice.settings["instruction"] = ASK_FOR_PROGRAM
        return choice
    given = {"prompt_key": wishes.prompt_key, "answer_key": wishes.answer_key}
    choice.settings |= {key: column for key, column in given.items() if column}
    return choice


def choose_reward(reward: str, tests: str = "") -> dict[str, Any]:
    """The settings of `[reward]`: a name, a dotted path, `my_reward.py`, `my_reward.py:function` or `judge:MODEL`."""
    if reward == CODE:
        return {"type": CODE, **({"tests": tests} if tests else {})}
    file, _, function = reward.partition(":")
    if file == JUDGE:
        return {"type": JUDGE, **({"judge_model": function} if function else {})}
    if file.endswith(".py"):
        return {"type": CUSTOM, "custom_module": file, **({"custom_function": function} if function else {})}
    return {"type": reward} if reward else {}


def folder_of(wishes: Wishes) -> str:
    """`logs/tasks` for `data/tasks.jsonl`."""
    stem = re.sub(r"[^\w-]+", "-", Path(wishes.data.partition(":")[2] or wishes.data.rstrip("/")).stem).strip("-")
    return wishes.log_dir or f"logs/{stem or 'train'}"


def _required(plugins: Plugins, name: str, value: str) -> dict[str, Any]:
    """`value` as the one option without which the source does nothing, as the data set of `reasoning_gym`."""
    params = resolve(plugins, Kind.DATA_SOURCE, name, where="--data").params
    fields = params.model_fields if params else {}
    wanted = [key for key, info in fields.items() if info.is_required()]
    if bool(wanted) == bool(value):
        return {wanted[0]: value} if wanted else {}
    if value:
        raise ConfigError(
            Problem(
                where=f"--data {name}:{value}",
                what=f"{name!r} takes no {value!r}, and no such file is here",
                fix=f"--data {name}",
            )
        )
    what, fix = f"{name!r} needs its {wanted[0]}", f"write it behind a colon: --data {name}:{wanted[0].upper()}"
    raise ConfigError(Problem(where=f"--data {name}", what=what, fix=fix))


def _path_settings(wishes: Wishes) -> dict[str, Any]:
    data = wishes.data.removeprefix(f"{HUB}:").removeprefix(f"{FILES}:")
    folder = Path(data).expanduser()
    is_hub = not folder.exists() and HUB_ID.fullmatch(data) and not data.lower().endswith(TABULAR)
    found: dict[str, Any] = {"source": HUB if is_hub else FILES, "path": data}
    has_splits = folder.is_dir() and any(SPLIT_NAME.search(entry.name) for entry in folder.rglob("*"))
    return found | _options(wishes, {"split": "train"} if has_splits else {})


def _options(wishes: Wishes, options: Mapping[str, Any]) -> dict[str, Any]:
    named = {"subset": wishes.subset, "split": wishes.split, "revision": wishes.revision}
    both = {**options, **{name: value for name, value in named.items() if value}}
    return {"options": both} if both else {}


def _columns(settings: Mapping[str, Any], wishes: Wishes, plugins: Plugins) -> Columns:
    """Look at the first rows, whatever their columns are."""
    tables = registered_tables(plugins)
    arguments = [word for key, value in settings.items() if key != "options" for word in (f"--data-{key}", value)]
    config, problems = read_config(None, plugins, tables, arguments=arguments, environ={})
    if problems:
        raise ConfigError(*problems)
    context = PluginContext(config=config, seeds=Seeds(0), plugins=plugins)
    options = settings.get("options", {})
    source = build_part(Kind.DATA_SOURCE, str(settings["source"]), "data.source", context, options, "data.options")
    try:
        rows = source.preview(PREVIEWED)
    except ConfigError as error:
        if settings["source"] != HUB:
            raise
        what = f"no file or folder {wishes.data!r} is here, so it was looked for on the hub"
        raise ConfigError(
            Problem(where=f"--data {wishes.data}", what=what, fix="check the path"), *error.problems
        ) from None
    if not rows:
        raise ConfigError(
            Problem(where=f"--data {wishes.data}", what="the data set is empty", fix="give one task per row")
        )
    where, by_tests = f"--data {wishes.data}", wishes.reward == CODE
    return find_columns(rows, prompt=wishes.prompt_key, answer=wishes.answer_key, where=where, by_tests=by_tests)
