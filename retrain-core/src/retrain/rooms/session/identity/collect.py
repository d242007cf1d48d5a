"""Collects what a configuration runs on: the project's code, data and model files, plugin distributions, packages."""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import islice
from pathlib import Path
from typing import Any

from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.installed import versions_of
from retrain.kernel.plugins.manager import Plugins
from retrain.kernel.plugins.resolve import module_of
from retrain.rooms.session.identity.hashing import (
    BLOCKS,
    DIGEST_BYTES,
    MAX_FILES,
    Budget,
    HashedFile,
    files_below,
    hash_file,
)
from retrain.rooms.session.identity.imports import ImportGraph, is_installed
from retrain.rooms.session.identity.plugin_files import PluginFiles, plugin_files, plugin_modules
from retrain.rooms.session.identity.variables import variables_read
from retrain.rooms.session.locate import module_file
from retrain.rooms.session.records.checkpoints import locate_adapter
from retrain.rooms.session.records.reading import read_regular
from retrain.rooms.session.selected import selected_parts

DOTTED = "dotted path"
MODEL_WHOLE_BYTES = 2**24  # larger files of a model folder, its weights, are sampled
HUB_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
DATA_SUFFIXES = (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet", ".txt")
FREE_FORM = (  # whatever a plugin takes: a data file among it is recognised by its suffix
    *("backend.options", "data.options", "data.sampler_params", "environment.args", "eval.sets"),
    *("inference.options", "planning.params", "reward.params"),
    *(f"algorithm.{name}" for name in ("params", "advantage_params", "transform_params")),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What a run consists of besides its configuration.

    `code`: the project's modules that the configuration names, and those that they import. `data`: the files that it
    names. `model`: the files of local model folders and adapters. `plugins`: the installed plugin distributions, and
    that of the environment. `packages`: versions of other installed packages that the configuration names a module of.
    `variables`: hashes of the environment variables that code and plugins of the user read. `notes` say what was not
    hashed completely.
    """

    code: tuple[HashedFile, ...] = ()
    data: tuple[HashedFile, ...] = ()
    model: tuple[HashedFile, ...] = ()
    plugins: Mapping[str, PluginFiles] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def files(self) -> Iterator[tuple[str, HashedFile]]:
        """Every file with its kind: `code`, `data`, `model` or the name of a plugin distribution."""
        for kind in ("code", "data", "model"):
            yield from ((kind, file) for file in getattr(self, kind))
        for name, plugin in self.plugins.items():
            yield from ((name, file) for file in plugin.files)

    @property
    def notes(self) -> list[str]:
        """What was not hashed completely, and why."""
        return [
            f"{file.path}: {file.problem or f'{file.size} bytes, of which at most {BLOCKS} blocks are hashed'}"
            for _, file in self.files
            if file.problem or file.is_sampled
        ]

    def summary(self) -> dict[str, Any]:
        """The form that `run.json` holds: a digest per kind, versions, and notes."""
        kinds = {kind: _summary(getattr(self, kind)) for kind in ("code", "data", "model")}
        plugins = {
            name: {"version": plugin.version, "first_party": plugin.is_ours, **_summary(plugin.files)}
            for name, plugin in self.plugins.items()
        }
        found = {"packages": dict(self.packages), "variables": dict(self.variables), "notes": self.notes}
        return {**kinds, "plugins": plugins, **found}

    def as_data(self) -> dict[str, Any]:
        """`summary` with the files of each kind, by name, as `stored_identity` returns it."""
        data = self.summary()
        for kind in ("code", "data", "model"):
            data[kind]["files"] = _by_name(getattr(self, kind))
        for name, plugin in self.plugins.items():
            files = {
                file.name: {"hash": file.hash, **({"problem": file.problem} if file.problem else {})}
                for file in plugin.files
            }
            data["plugins"][name] |= {"root": plugin.root, "files": files}
        return data


def collect_identity(config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]) -> Identity:
    """Hash everything that a configuration names, without importing any part."""
    modules = plugin_modules(plugins)
    graph = ImportGraph(foreign=frozenset(top for tops in modules.values() for top in tops))
    budget, packages = Budget(), dict[str, str]()
    for module in _dotted_modules(config, plugins, tables):
        _add_module(module, graph, packages)
    for path in key_paths(tables, "code"):
        _add_code(str(config.value(path, "")), graph, packages)
    shadow: Mapping[str, Any] = config.value("reward.shadow_params", {})
    for reward in (shadow, *(values.get("reward") for values in _eval_sets(config))):
        _add_code(str(reward.get("custom_module", "")) if isinstance(reward, Mapping) else "", graph, packages)
    for path in key_paths(tables, "package"):
        _add_package(str(config.value(path, "")), graph, modules, packages)
    arguments: Mapping[str, Any] = config.value("environment.args", {})
    for word in str(arguments.get("command", "")).split():
        if word.endswith(".py") and os.path.isfile(word):
            graph.add_file(Path(word))
    without = frozenset(_record_folders(config))
    code, theirs = tuple(_code_files(graph, budget)), plugin_files(modules, budget)
    sources = [*code, *(file for plugin in theirs.values() if not plugin.is_ours for file in plugin.files)]
    return Identity(
        code=code,
        data=tuple(_data_files(config, tables, without, budget)),
        model=tuple(_model_files(config, plugins, tables, budget)),
        plugins=theirs,
        packages=dict(sorted(packages.items())),
        variables=variables_read(_text_of(file) for file in sources if file.name.endswith(".py")),
    )


def _text_of(file: HashedFile) -> bytes:
    """The source of a module; empty where it cannot be read."""
    if file.content or not file.size:
        return file.content
    with suppress(OSError):
        return read_regular(Path(file.path))
    return b""


def _eval_sets(config: Config) -> list[Mapping[str, Any]]:
    """The keys of each `[eval.sets.NAME]`."""
    sets: Mapping[str, Mapping[str, Any]] = config.value("eval.sets", {})
    return list(sets.values())


def key_paths(tables: Mapping[str, TableEntry], reads: str) -> list[str]:
    """The keys whose value names an input of this sort: `code`, `data`, `package`, `model` or `adapter`."""
    return [
        f"{table}.{info.alias or name}"
        for table, entry in tables.items()
        for name, info in entry.model.model_fields.items()
        if isinstance(info.json_schema_extra, dict) and info.json_schema_extra.get("reads") == reads
    ]


def _dotted_modules(config: Config, plugins: Plugins, tables: Mapping[str, TableEntry]) -> Iterator[str]:
    for part in selected_parts(config, plugins, tables):
        if part.source == DOTTED and (module := module_of(part.name, config.plugins.search_paths)):
            yield module


def _add_module(name: str, graph: ImportGraph, packages: dict[str, str], folder: str = "") -> None:
    """A module of the project with what it imports, or the version of the installed package that has it."""
    if graph.add(name, folder):
        return
    top = name.partition(".")[0]
    if top not in graph.foreign and is_installed(module_file(top)):
        packages |= versions_of(dict.fromkeys((top, top.replace("_", "-"))))


def _add_code(value: str, graph: ImportGraph, packages: dict[str, str]) -> None:
    if value.endswith(".py"):
        graph.add_file(Path(value))
    elif value.strip():
        _add_module(value, graph, packages)


def _add_package(value: str, graph: ImportGraph, modules: dict[str, set[str]], packages: dict[str, str]) -> None:
    """An environment's package by its id, `owner/name@version`: code of the project, or files of a distribution.

    An agent is given as `module:function`.
    """
    if ":" in value:
        _add_module(value.partition(":")[0], graph, packages)
        return
    name = value.rpartition("/")[2].partition("@")[0].replace("-", "_")
    for module in dict.fromkeys((name, name.lower())):
        if module.isidentifier() and not graph.add(module) and module_file(module):
            spelt = versions_of((module, module.replace("_", "-")))
            modules.setdefault(next(iter(spelt), module), set()).add(module)


def _code_files(graph: ImportGraph, budget: Budget) -> Iterator[HashedFile]:
    for module in sorted(graph.found.values(), key=lambda module: module.file):
        if module.file:
            inside = os.path.relpath(module.file, module.root)
            name = inside if module.name else module.file  # a file that was not named as a module, as it was named
            yield hash_file(Path(name).as_posix(), Path(module.file), budget)


def _data_files(
    config: Config, tables: Mapping[str, TableEntry], without: frozenset[str], budget: Budget
) -> Iterator[HashedFile]:
    named = [config.value(path, "") for path in key_paths(tables, "data")]
    named += [values.get("path", "") for values in _eval_sets(config)]
    for value in dict.fromkeys(str(each) for each in named if each):
        yield from _named_files(value, without, budget)
    for value in dict.fromkeys(text for path in FREE_FORM for text in _texts(config.value(path, {}))):
        if value.lower().endswith(DATA_SUFFIXES) and os.path.isfile(os.path.expanduser(value)):
            yield hash_file(value, Path(value).expanduser(), budget)


def _named_files(value: str, without: frozenset[str], budget: Budget) -> Iterator[HashedFile]:
    """The file of a path, those of a folder, or those that a pattern matches; none when it is no local path."""
    path = Path(value).expanduser()
    if "://" in value or (HUB_ID.fullmatch(value) and not value.lower().endswith(DATA_SUFFIXES) and not path.exists()):
        return  # what it gives is compared example by example: see `ExampleCheck`
    if path.is_dir():
        yield from _folder_files(value, path, without, budget)
    elif path.exists() or not glob.has_magic(value):
        yield hash_file(value, path, budget)
    else:
        for each in sorted(glob.glob(str(path), recursive=True)):
            if not os.path.isdir(each):
                yield hash_file(each, Path(each), budget)


def _folder_files(value: str, folder: Path, without: frozenset[str], budget: Budget) -> Iterator[HashedFile]:
    files = list(islice(files_below(folder, without=without), MAX_FILES + 1))
    for file in files[:MAX_FILES]:
        yield hash_file(f"{value.rstrip('/')}/{os.path.relpath(file, folder)}", file, budget)
    if len(files) > MAX_FILES:
        yield HashedFile(name=value, path=str(folder), problem=f"only the first {MAX_FILES} files are hashed")


def _model_files(
    config: Config, plugins: Plugins, tables: Mapping[str, TableEntry], budget: Budget
) -> Iterator[HashedFile]:
    """The files of local model folders and adapters: weights by size and blocks; none for a model on the hub."""
    own = config.model.model
    named = [str(config.value(path, "")) for path in key_paths(tables, "model")]
    for name in dict.fromkeys((own, *filter(None, named))):
        folder = Path(plugins.notify("retrain_locate_model", model=name) or name).expanduser()
        yield from _weights_below(folder, budget, prefix="" if name == own else f"{name.rstrip('/')}/")
    for path in key_paths(tables, "adapter"):
        if name := str(config.value(path, "")):
            with suppress(ConfigError):  # the part that loads it says what is wrong
                yield from _weights_below(locate_adapter(name), budget, prefix=f"{name.rstrip('/')}/")


def _weights_below(folder: Path, budget: Budget, *, prefix: str) -> Iterator[HashedFile]:
    for file in files_below(folder) if folder.is_dir() else ():
        name = f"{prefix}{os.path.relpath(file, folder)}"
        yield hash_file(name, file, budget, sampled_above=MODEL_WHOLE_BYTES, with_time=False, is_kept=False)


def _record_folders(config: Config) -> Iterator[str]:
    """Where this run writes: not part of what it reads, even inside a data folder."""
    for folder in (config.logging.log_dir, config.backend.adapter_path, config.backend.throttle_dir):
        if folder:
            yield os.path.realpath(os.path.expanduser(folder))


def _texts(value: object) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _texts(each)


def _by_name(files: tuple[HashedFile, ...]) -> dict[str, dict[str, Any]]:
    return {file.name: file.as_data() for file in files}


def _summary(files: tuple[HashedFile, ...]) -> dict[str, Any]:
    digest = blake2b(digest_size=DIGEST_BYTES)
    for file in sorted(files, key=lambda file: file.name):
        text = f"{file.name}\0{file.hash}\0{file.mtime_ns}\0{file.problem}\n"
        digest.update(text.encode("utf-8", "surrogateescape"))
    return {"digest": digest.hexdigest(), "num_files": len(files)}
