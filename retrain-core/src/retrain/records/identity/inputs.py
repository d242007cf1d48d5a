"""Finds every value of a configuration that names an input of the run, or another path, with its keys."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import Config
from retrain.kernel.declared import Kind
from retrain.kernel.registry import Plugins
from retrain.records.reading import table_of

CODE, DATA, PATH = "code", "data", "path"
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
OWN_MODEL = ("model", "model")
COMMAND = ("environment", "args", "command")  # a text whose words may be files
PARAMS = (  # the model of these options is declared by the part that a key names
    (Kind.BACKEND, "backend.backend", "backend.options"),
    (Kind.DATA_SOURCE, "data.source", "data.options"),
    (Kind.DATA_SOURCE, "sft.source", "sft.options"),
    (Kind.SAMPLER, "data.sampler", "data.sampler_params"),
    (Kind.ALGORITHM, "algorithm.algorithm_mode", "algorithm.params"),
    (Kind.ADVANTAGE, "algorithm.advantage_mode", "algorithm.advantage_params"),
    (Kind.TRANSFORM, "algorithm.transform_mode", "algorithm.transform_params"),
    (Kind.LOSS, "algorithm.loss", "algorithm.loss_params"),
    (Kind.INFERENCE_ENGINE, "inference.engine", "inference.options"),
    (Kind.PLANNING_DETECTOR, "planning.detector", "planning.params"),
    (Kind.REWARD, "reward.type", "reward.params"),
)
# Whatever a plugin takes: a file among it is recognised by its suffix.
FREE_FORM = (*(options for _, _, options in PARAMS), "environment.args", "eval.sets", "data.tasks")

Keys = tuple[str, ...]  # ("eval", "sets", "hard", "path"); an index into a list is a text too


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedInput:
    """A value that names an input: `sort` is `reads` of its key, or `path` for a path that is no input.

    `written` is the value as the run recorded it; `value` is the same, or the recorded place.
    """

    keys: Keys
    sort: str
    value: str
    written: str


def named_inputs(config: Config, tables: Mapping[str, TableEntry], plugins: Plugins) -> list[NamedInput]:
    """Return all of them, each key once; `[campaign]` and `[resume]` are not part of a run."""
    left_out = {*config.foreign_tables, "resume"}
    values = {name: table for name, table in config.as_dict().items() if name not in left_out}
    found: dict[Keys, tuple[str, str]] = {}
    for keys, sort in _declared(config, tables, plugins, values):
        for place, text in texts_below(value_at(values, keys), keys):
            found.setdefault(place, (sort, text))
    # After the declared keys, since a suffix is only a guess.
    for path in FREE_FORM:
        keys = tuple(path.split("."))
        for place, text in texts_below(value_at(values, keys), keys):
            for word in words_of(text) if place == COMMAND else (text,):
                sort = DATA if word.lower().endswith(DATA_SUFFIXES) else CODE if word.endswith(".py") else ""
                if sort and os.path.isfile(os.path.expanduser(word)):
                    found.setdefault((*place, word) if place == COMMAND else place, (sort, word))
    return [
        NamedInput(keys=keys, sort=sort, value=text, written=_written(config, keys, text))
        for keys, (sort, text) in found.items()
        if text.strip()
    ]


def declared_sorts(model: type[BaseModel]) -> dict[str, str]:
    """Return the keys of a model whose values name inputs or other paths, each with its sort."""
    extras = {info.alias or name: info.json_schema_extra for name, info in model.model_fields.items()}
    dicts = {name: extra for name, extra in extras.items() if isinstance(extra, dict)}
    sorts = {name: extra.get("reads") or (PATH if extra.get("is_path") else "") for name, extra in dicts.items()}
    return {name: str(sort) for name, sort in sorts.items() if sort}


def texts_below(value: object, keys: Keys) -> Iterator[tuple[Keys, str]]:
    """Yield every text in a value, with the keys that lead to it."""
    if isinstance(value, str):
        yield keys, value
    elif isinstance(value, Mapping):
        for name, each in value.items():
            yield from texts_below(each, (*keys, str(name)))
    elif isinstance(value, list | tuple):
        for number, each in enumerate(value):
            yield from texts_below(each, (*keys, str(number)))


def words_of(command: str) -> list[str]:
    """Return the words of a command line; the text itself where its quotes do not match."""
    try:
        return shlex.split(command)
    except ValueError:
        return [command]


def _declared(
    config: Config, tables: Mapping[str, TableEntry], plugins: Plugins, values: Mapping[str, Any]
) -> Iterator[tuple[Keys, str]]:
    """Yield the declared keys in tables, in the options of parts, and in tables within tables."""
    sorts = {table: declared_sorts(entry.model) for table, entry in tables.items()}
    for table, own in sorts.items():
        yield from (((table, name), sort) for name, sort in own.items())
    for kind, path, options in PARAMS:
        keys = tuple(options.split("."))
        yield from (((*keys, name), sort) for name, sort in _sorts_of_part(kind, config.value(path, ""), plugins))
    yield from ((("reward", "shadow_params", name), sort) for name, sort in sorts.get("reward", {}).items())
    within = [(("eval", "sets", str(name)), given) for name, given in table_of(values, "eval", "sets").items()]
    within += [(("data", "tasks", str(number)), given) for number, given in enumerate(config.data.tasks)]
    for own_keys, given in within:
        yield from (((*own_keys, name), sort) for name, sort in sorts.get("data", {}).items())
        for table in ("reward", "environment"):
            yield from (((*own_keys, table, name), sort) for name, sort in sorts.get(table, {}).items())
        source = str(given.get("source", config.data.source))
        yield from (
            ((*own_keys, "options", name), sort) for name, sort in _sorts_of_part(Kind.DATA_SOURCE, source, plugins)
        )


def _sorts_of_part(kind: Kind, name: str, plugins: Plugins) -> Iterator[tuple[str, str]]:
    entries = plugins.find(kind, name) if name else ()
    with suppress(Exception):  # a fault of that plugin is reported where its part is checked
        model = entries[0].spec.load_params() if len(entries) == 1 else None
        yield from declared_sorts(model).items() if model else ()


def _written(config: Config, keys: Keys, text: str) -> str:
    """Return the text under these keys before a recorded place replaced it."""
    table, name, *below = keys
    before = config.written.get(f"{table}.{name}")
    if before is None:
        return text
    if keys[:-1] == COMMAND:
        # Recorded places replaced whole words, so the words of both commands correspond.
        arguments: Mapping[str, Any] = config.environment.args
        now, then = (words_of(str(value_at(given, COMMAND[2:]))) for given in (arguments, before))
        return dict(zip(now, then, strict=False)).get(text, text)
    found = value_at(before, tuple(below))
    return found if isinstance(found, str) else text


def value_at(value: Any, keys: Keys) -> Any:
    """Return the value under these keys in nested tables; None without one."""
    for name in keys:
        if isinstance(value, Mapping):
            value = value.get(name)
        elif isinstance(value, list | tuple) and name.isdecimal() and int(name) < len(value):
            value = value[int(name)]
        else:
            return None
    return value


def places_entry(config: Config, tables: Mapping[str, TableEntry], plugins: Plugins, run: Path) -> dict[str, Any]:
    """Return the entry `paths` of a manifest: the place of each path in this configuration."""

    def entry(absolute: str) -> dict[str, Any]:
        return {"absolute": absolute, "relative": os.path.relpath(absolute, os.path.abspath(run))}

    named = [(each, local_place(each, plugins)) for each in named_inputs(config, tables, plugins)]
    found = [
        {"keys": list(each.keys), "sort": each.sort, "written": each.written, **entry(place)}
        for each, place in named
        if place
    ]
    return {"folder": entry(config.folder or os.getcwd()), "keys": found}


def local_place(named: NamedInput, plugins: Plugins) -> str:
    """Return the absolute path of a value; empty for an id, a URL, a module or a package."""
    value = os.path.expanduser(named.value)
    is_path = "://" not in value and named.sort != "package"
    if named.sort == "model":
        is_path = os.path.isdir(value) and plugins.locate_model(named.value) is None
    elif named.sort == DATA:
        is_path = is_local(named.value)
    elif named.sort == CODE:
        is_path = value.endswith(".py")
    return os.path.abspath(value) if is_path else ""


def is_local(value: str) -> bool:
    """True if a value of data is a path here, not a URL or the id of a data set."""
    is_id = HUB_ID.fullmatch(value) and not value.lower().endswith(DATA_SUFFIXES)
    return "://" not in value and not (is_id and not Path(value).expanduser().exists())
