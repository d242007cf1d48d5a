"""Layers defaults, recipe, file, environment and flags into one `Config`, and collects every problem it finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, TypeAdapter, ValidationError

from retrain.kernel.config.keys import Key, keys_of
from retrain.kernel.config.resolved import Config, Layer, Origin
from retrain.kernel.config.toml_file import key_lines, parse_free, read_toml, toml_text, unquoted
from retrain.kernel.declared import TableTraits
from retrain.kernel.errors import Problem

AUTO, RANK = "auto", "model.lora_rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class TableEntry:
    """A registered table: its model, its traits, and the `problems` of its extensions."""

    model: type[BaseModel]
    traits: TableTraits = field(default_factory=TableTraits)
    problems: tuple[Problem, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A value of `table.key` that already has its type, as a condition of a campaign supplies it."""

    path: str
    value: Any
    origin: Origin


@dataclass(slots=True)
class _Draft:
    """The values layered so far, `values[table][key]`, with the origin of each."""

    tables: Mapping[str, TableEntry]
    table_hint: Callable[[str], str]
    values: dict[str, dict[str, Any]] = field(default_factory=dict)
    origins: dict[str, Origin] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    in_file: set[str] = field(default_factory=set)  # tables
    keys: dict[str, Key] = field(default_factory=dict)

    def set(self, path: str, value: Any, origin: Origin) -> None:
        table, _, name = path.partition(".")
        self.values.setdefault(table, {})[name] = value
        self.origins[path] = origin

    def value(self, path: str) -> Any:
        table, _, name = path.partition(".")
        return self.values.get(table, {}).get(name)

    def place(self, path: str) -> str:
        table, _, name = path.partition(".")
        return f"{self.origins.get(path, 'default')} [{table}] {name}".rstrip()


def all_keys(tables: Mapping[str, TableEntry]) -> list[Key]:
    return [key for name, entry in tables.items() for key in keys_of(name, entry.model, entry.traits.flag_prefix)]


def load_config(
    file: Path | Mapping[str, Any] | None,
    *,
    tables: Mapping[str, TableEntry],
    arguments: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    table_hint: Callable[[str], str] = lambda table: "",
    settings: Sequence[Setting] = (),
    recipe: Callable[[Mapping[str, Mapping[str, Any]]], tuple[list[Setting], list[Problem]]] | None = None,
) -> tuple[Config, list[Problem]]:
    """Resolve the configuration of one run.

    `file` may be the tables themselves; messages call them by their `str`. `arguments` are command-line overrides;
    `settings` override everything else. `recipe` adds values to those given, `values[table][key]`; of a key that was
    given it may return a table with more entries. `table_hint` says which distribution would provide an unknown table,
    and what became of an unknown `table.key`. All problems are returned together; if there are any, the config holds
    defaults in the tables concerned and must not be used for training.
    """
    keys = all_keys(tables)
    draft = _Draft(tables=tables, table_hint=table_hint, keys={key.path: key for key in keys})
    draft.problems += [problem for entry in tables.values() for problem in entry.problems]
    _read_file(draft, {} if file is None else file)
    for overrides, problems in (from_environment(environ or {}, keys), from_arguments(arguments, keys)):
        draft.problems += problems
        for override in overrides:
            _apply(draft, override)
    # Entries of a free table are added to those already set.
    for setting in settings:
        current = draft.value(setting.path)
        is_table = isinstance(setting.value, Mapping) and isinstance(current, Mapping)
        draft.set(setting.path, {**current, **setting.value} if is_table else setting.value, setting.origin)
    # After all layers although it is below them: a recipe fills only keys that none of them sets.
    added, problems = recipe(draft.values) if recipe else ([], [])
    draft.problems += problems
    for setting in added:
        draft.set(setting.path, setting.value, draft.origins.get(setting.path, setting.origin))
    for key in keys:
        if key.auto and draft.value(key.path) == AUTO:
            draft.set(key.path, key.auto[draft.value(RANK) == 0], draft.origins[key.path])
    models = {name: _validate(draft, name, entry.model) for name, entry in tables.items()}
    foreign = frozenset(name for name, entry in tables.items() if entry.traits.starts_runs)
    config = Config(tables=models, origins=draft.origins, source=str(file or ""), foreign_tables=foreign)
    draft.problems += _pending(config, draft)
    return config, draft.problems


def _read_file(draft: _Draft, file: Path | Mapping[str, Any]) -> None:
    document, text = (file, "") if isinstance(file, Mapping) else read_toml(file)
    lines = key_lines(text)
    for table, content in document.items():
        place = f"{file}:{lines.get(table, 1)}" if lines else f"{file}"
        if table not in draft.tables:
            draft.problems.append(_unknown_table(draft, table, content, place))
        elif not isinstance(content, dict):
            what = f"[{table}] must be a table, not {_type_name(content)}"
            draft.problems.append(Problem(code="config.not-a-table", where=place, what=what, fix=f"write [{table}]"))
        else:
            draft.in_file.add(table)
            legacy_keys = draft.tables[table].traits.legacy_keys
            if not legacy_keys.keys().isdisjoint(content):
                # Imported here: its TOML writer is needed only for a legacy key.
                from retrain.kernel.config.legacy import legacy_problem

                draft.problems.append(legacy_problem(table, content, legacy_keys, file, lines))
            for name in (name for name in content if name not in legacy_keys):
                line = lines.get(f"{table}.{name}", lines.get(table, 1))
                origin = Origin(layer=Layer.FILE, place=f"{file}:{line}" if lines else place)
                _take(draft, table, name, content[name], origin)


def _take(draft: _Draft, table: str, name: str, value: Any, origin: Origin) -> None:
    for key in draft.keys.values():
        if key.table == table and (name == key.name or name in key.aliases):
            if key.path in draft.origins:
                where, what = f"{origin} [{table}] {name}", f"sets {key.name} a second time"
                draft.problems.append(
                    Problem(code="config.key-twice", where=where, what=what, fix="remove one of the two values")
                )
            draft.set(key.path, value, origin)
            return
    own = [key.name for key in draft.keys.values() if key.table == table]
    near = get_close_matches(name, own)
    elsewhere = sorted((key for key in draft.keys.values() if key.name == name), key=lambda key: len(key.flag))
    fix = f"{name!r} belongs to [{elsewhere[0].table}]" if elsewhere else f"use one of: {', '.join(own)}"
    fix = draft.table_hint(f"{table}.{name}") or (f"did you mean {near[0]!r}?" if near else fix)
    where = f"{origin} [{table}] {name}"
    draft.problems.append(Problem(code="config.unknown-key", where=where, what="unknown key", fix=fix))


def _unknown_table(draft: _Draft, table: str, content: Any, place: str) -> Problem:
    if not isinstance(content, dict):
        # The shortest flag belongs to the table that is meant most often: `lr` of [training], not of [sft].
        owners = sorted((key for key in draft.keys.values() if key.name == table), key=lambda key: len(key.flag))
        what = f"key {table!r} is outside any table"
        fix = f"move it under [{owners[0].table}]" if owners else "put it under a table, or remove it"
        return Problem(code="config.key-outside-table", where=place, what=what, fix=fix)
    near, known = get_close_matches(table, draft.tables, n=1), ", ".join(sorted(draft.tables))
    hint = draft.table_hint(table)
    fix = hint if hint else f"did you mean [{near[0]}]?" if near else f"use one of: {known}"
    return Problem(code="config.unknown-table", where=f"{place} [{table}]", what="unknown table", fix=fix)


def _apply(draft: _Draft, override: Override) -> None:
    key = draft.keys[override.path]
    if override.entry:
        current = draft.value(override.path)
        merged = {**(current if isinstance(current, dict) else {}), override.entry: parse_free(override.text)}
        draft.set(override.path, merged, override.origin)
        return
    try:
        draft.set(override.path, _parse(key, override.text), override.origin)
    except ValueError as error:
        what, fix = f"{override.text!r} is not a valid {key.path}: {error}", _expected(key, override.text, is_text=True)
        draft.problems.append(Problem(code="config.bad-value", where=str(override.origin), what=what, fix=fix))


def _parse(key: Key, text: str) -> Any:
    """Text from a flag or the environment, parsed as the type of its key; a text key keeps it verbatim."""
    if key.annotation is str or (key.auto and text == AUTO):
        return text
    container = isinstance(key.default, list | dict)
    value: Any = text
    if container and text.strip().startswith(("[", "{")):
        value = parse_free(text)
    elif isinstance(key.default, list):
        # Parts of a list of text stay text, even where they look like numbers.
        value = [parse_free(part.strip()) if key.annotation != list[str] else part.strip() for part in text.split(",")]
    try:
        # Plain text converts leniently; the parts of a JSON list or table already have their types.
        return TypeAdapter(key.annotation).validate_python(value, strict=container)
    except ValidationError as error:
        raise ValueError(error.errors()[0]["msg"]) from None


def _validate(draft: _Draft, table: str, model: type[BaseModel]) -> BaseModel:
    """Validate a table as its model; keys with a problem get their defaults, so that the others are checked too."""
    values = draft.values.get(table, {})
    try:
        return model.model_validate(values)
    except ValidationError as error:
        faulty = set()
        for detail in error.errors():
            name = str(detail["loc"][0]) if detail["loc"] else ""
            faulty.add(name)
            inner = "".join(f".{part}" for part in detail["loc"][1:])
            # pydantic puts these words in front of the text of a ValueError.
            message = detail["msg"].removeprefix("Value error, ")
            given = detail["input"]
            got = "" if detail["type"] == "value_error" else f", not {_show(given)}"
            key = draft.keys.get(f"{table}.{name}")
            fix = _expected(key, given) if key else "correct the table"
            where = draft.place(f"{table}.{name}") + inner
            draft.problems.append(Problem(code="config.bad-value", where=where, what=f"{message}{got}", fix=fix))
    try:
        return model.model_validate({name: value for name, value in values.items() if name not in faulty})
    # A rule about several keys names none of them, so the whole table falls back to its defaults.
    except ValidationError:
        return model.model_validate({})


def _pending(config: Config, draft: _Draft) -> list[Problem]:
    problems, values = [], config.as_dict()
    for path, origin in draft.origins.items():
        key = draft.keys[path]
        where, traits = draft.place(path), draft.tables[key.table].traits
        # An optional value that is absent is None.
        value = values[key.table].get(key.name)
        if origin.layer is Layer.COMMAND_LINE and traits.starts_runs and key.table not in draft.in_file:
            what, fix = f"changes nothing: the file has no [{key.table}]", f"remove {origin}, or add [{key.table}]"
            problems.append(Problem(code="config.flag-without-table", where=where, what=what, fix=fix))
        elif key.pending and value != key.default:
            what, fix = f"{_show(value)} is refused: {key.pending}", f"keep the default {toml_text(key.default)}"
            problems.append(Problem(code="config.not-supported", where=where, what=what, fix=fix))
    return problems


def _expected(key: Key, value: Any, *, is_text: bool = False) -> str:
    meant = "" if is_text else unquoted(value, key.default)
    choices = [choice for choice in get_args(key.annotation) if isinstance(choice, str)]
    if near := get_close_matches(str(value).lower(), choices):
        return f"did you mean {near[0]!r}?"
    return f"write {meant}, without quotes" if meant else f"{key.description} Default: {toml_text(key.default)}"


def _show(value: Any) -> str:
    text = repr(value)
    return f"{_type_name(value)} {text if len(text) <= 60 else text[:57] + '...'}"


def _type_name(value: Any) -> str:
    names = {str: "text", int: "the integer", float: "the number", bool: "the boolean"}
    return (names | {list: "the list", dict: "the table"}).get(type(value), type(value).__name__)


# Command-line flags and environment variables that set a key.

ENV_PREFIX = "RETRAIN__"
HERE = Layer.COMMAND_LINE.value  # place of a problem
PARAM_FLAGS = {
    "--backend-opt": "backend.options",
    "--data-opt": "data.options",
    "--algorithm-param": "algorithm.params",
    "--advantage-param": "algorithm.advantage_params",
    "--transform-param": "algorithm.transform_params",
}
FLAG_ALIASES = {"--resume": "resume.from"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """A textual value for `table.key`; with `entry`, for one entry of the table stored under that key."""

    path: str
    text: str
    origin: Origin
    entry: str = ""


def from_environment(environ: Mapping[str, str], keys: Sequence[Key]) -> tuple[list[Override], list[Problem]]:
    """`RETRAIN__TRAINING__LR=1e-4` sets `[training] lr`."""
    paths = {key.path.upper().replace(".", "__"): key.path for key in keys}
    overrides, problems = [], []
    for name in sorted(environ):
        if not name.startswith(ENV_PREFIX):
            continue
        suffix = name.removeprefix(ENV_PREFIX).upper()
        if (path := paths.get(suffix)) is None:
            near, where = get_close_matches(suffix, paths), f"environment variable {name}"
            fix = f"use {ENV_PREFIX}{near[0]}" if near else f"unset {name}"
            problems.append(Problem(code="config.unknown-variable", where=where, what="sets no known key", fix=fix))
        else:
            origin = Origin(layer=Layer.ENVIRONMENT, place=name)
            overrides.append(Override(path=path, text=environ[name], origin=origin))
    return overrides, problems


def from_arguments(arguments: Sequence[str], keys: Sequence[Key]) -> tuple[list[Override], list[Problem]]:
    """`--flag value`, `--flag=value`, `--set table.key=value`, repeatable `--*-param k=v`; later ones win."""
    flags = {f"--{key.flag}": key.path for key in keys} | FLAG_ALIASES
    switches = {f"--{key.flag}" for key in keys if key.annotation is bool}
    overrides: list[Override] = []
    problems: list[Problem] = []
    rest = list(arguments)
    while rest:
        word = rest.pop(0)
        flag, equals, value = word.partition("=")
        if not flag.startswith("--") or flag == "--":
            what = f"unexpected argument {word!r}"
            problems.append(
                Problem(code="config.extra-argument", where=HERE, what=what, fix="remove it, or write --key value")
            )
            continue
        if flag not in flags and flag not in PARAM_FLAGS and flag != "--set":
            # `--schedule` and `--optimizer-schedule` both name the key behind the flag `--optim-schedule`.
            wanted = flag.removeprefix("--").replace("-", "_")
            near = [each for each, path in flags.items() if wanted in (path.replace(".", "_"), path.partition(".")[2])]
            # Below difflib's usual 0.6, because a missing prefix changes much of a short flag.
            near = near or get_close_matches(flag, [*flags, *PARAM_FLAGS, "--set"], n=1, cutoff=0.5)
            fix = f"did you mean {' or '.join(near)}?" if near else "see `retrain explain --keys`"
            problems.append(Problem(code="config.unknown-flag", where=HERE, what=f"unknown flag {flag}", fix=fix))
            if not equals and rest and not rest[0].startswith("--"):
                # The word after an unknown flag is its value: one problem, not two.
                rest.pop(0)
            continue
        if not equals:
            if flag in switches and (not rest or rest[0].startswith("--")):
                # A switch such as `--resume-anyway` needs no value.
                rest.insert(0, "true")
            if not rest or rest[0].startswith("--"):
                what, fix = f"{flag} needs a value", f"write {flag}=VALUE"
                problems.append(Problem(code="config.value-missing", where=HERE, what=what, fix=fix))
                continue
            value = rest.pop(0)
        result = _override(flag, value, flags, {key.path for key in keys})
        (overrides if isinstance(result, Override) else problems).append(result)  # type: ignore[arg-type]
    return overrides, problems


def _override(flag: str, value: str, flags: Mapping[str, str], paths: set[str]) -> Override | Problem:
    origin = Origin(layer=Layer.COMMAND_LINE, place=flag)
    if flag in flags:
        return Override(path=flags[flag], text=value, origin=origin)
    name, equals, text = value.partition("=")
    if not equals or not name.strip():
        what, fix = f"{flag} {value!r} is not name=value", f"write {flag} name=value"
        return Problem(code="config.not-name-value", where=HERE, what=what, fix=fix)
    name = name.strip()
    if flag in PARAM_FLAGS:
        return Override(path=PARAM_FLAGS[flag], entry=name, text=text, origin=origin)
    if name in paths:
        return Override(path=name, text=text, origin=origin)
    parent, _, entry = name.rpartition(".")
    # One entry of a free table: `--set algorithm.transform_params.cap=0.1`.
    if parent in paths:
        return Override(path=parent, entry=entry, text=text, origin=origin)
    near = get_close_matches(name, paths)
    what, fix = f"--set names an unknown key {name!r}", f"use {near[0]}" if near else "see `retrain explain --keys`"
    return Problem(code="config.unknown-key", where=HERE, what=what, fix=fix)
