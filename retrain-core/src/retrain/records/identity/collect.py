"""Hashes everything that a configuration runs on: code, data, model files, plugin distributions, packages."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from retrain.kernel.config.load import TableEntry
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import ConfigError
from retrain.kernel.registry import Plugins
from retrain.records.checkpoints import locate_adapter
from retrain.records.files import new_digest
from retrain.records.identity import hashing
from retrain.records.identity.hashing import Budget, HashedFile, PluginFiles, weights_below
from retrain.records.identity.inputs import OWN_MODEL, NamedInput, named_inputs


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """The inputs of a run next to its configuration.

    `code`: the project's modules that the configuration names, and their imports. `data`: the files that it names.
    `model`: the files of local model folders and adapters. `plugins`: the distributions of the installed plugins and of
    the environment. `packages`: versions of other installed packages with a named module. `variables`: hashes of the
    environment variables that the user's code and plugins read.
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
        """Files that were not hashed completely, and why."""
        return [
            f"{file.path}: {file.problem or f'{file.size} bytes, of which at most {hashing.BLOCKS} blocks are hashed'}"
            for _, file in self.files
            if file.problem or file.is_sampled
        ]

    def summary(self) -> dict[str, Any]:
        """Return the form in `run.json`: a digest per kind, versions, and notes."""
        kinds = {kind: _summary(getattr(self, kind)) for kind in ("code", "data", "model")}
        plugins = {
            name: {"version": plugin.version, "first_party": plugin.is_ours, **_summary(plugin.files)}
            for name, plugin in self.plugins.items()
        }
        found = {"packages": dict(self.packages), "variables": dict(self.variables), "notes": self.notes}
        return {**kinds, "plugins": plugins, **found}

    def as_data(self) -> dict[str, Any]:
        """Return `summary` with the files of each kind, by name, as `stored_identity` does."""
        data = self.summary()
        for kind in ("code", "data", "model"):
            data[kind]["files"] = {file.name: file.as_data() for file in getattr(self, kind)}
        for name, plugin in self.plugins.items():
            files = {
                file.name: {"hash": file.hash, **({"problem": file.problem} if file.problem else {})}
                for file in plugin.files
            }
            data["plugins"][name] |= {"root": plugin.root, "files": files}
        return data


def collect_identity(
    config: Config, plugins: Plugins, tables: Mapping[str, TableEntry], dotted: Sequence[str]
) -> Identity:
    """Hash everything that a configuration names, without importing any part; `dotted` are its dotted paths."""
    modules, budget = hashing.plugin_modules(plugins), Budget()
    inputs = named_inputs(config, tables, plugins)
    code, packages, variables = tuple[HashedFile, ...](), dict[str, str](), dict[str, str]()
    if dotted or any(each.sort in ("code", "package") for each in inputs):
        from retrain.kernel.plugins.dotted_path import module_of
        from retrain.records.identity.code import project_code  # few runs name code

        own = [module for name in dotted if (module := module_of(name, config.plugins.search_paths))]
        code, packages = project_code(inputs, own, modules, budget)
    distributions = hashing.plugin_files(modules, budget)
    sources = [*code, *(file for each in distributions.values() if not each.is_ours for file in each.files)]
    if sources := [file for file in sources if file.name.endswith(".py")]:
        from retrain.records.identity.code import source_of, variables_read

        variables = variables_read(map(source_of, sources))
    written = (config.logging.log_dir, config.backend.adapter_path, config.backend.throttle_dir)
    # A run writes there, and its own records must not change its identity where they lie inside a data folder.
    without = frozenset(os.path.realpath(os.path.expanduser(each)) for each in written if each)
    named = {each.value: each.written for each in inputs if each.sort == "data"}
    data = [each for value, written in named.items() for each in hashing.named_files(value, written, without, budget)]
    return Identity(
        code=code,
        data=tuple(data),
        model=tuple(_model_files(inputs, plugins, budget)),
        plugins=distributions,
        packages=packages,
        variables=variables,
    )


def _model_files(inputs: Sequence[NamedInput], plugins: Plugins, budget: Budget) -> Iterator[HashedFile]:
    """Yield the files of local model folders and adapters; none for a model on the hub."""

    def prefix(named: NamedInput) -> str:  # empty for the model that is trained, wherever it lies
        return "" if named.keys == OWN_MODEL else f"{named.written.rstrip('/')}/"

    models = {each.value: each for each in reversed(inputs) if each.sort == "model"}  # [model] model before others
    for name, each in sorted(models.items(), key=lambda pair: pair[1].keys != OWN_MODEL):
        folder = Path(plugins.locate_model(name) or name).expanduser()
        yield from weights_below(folder, budget, prefix=prefix(each))
    for each in inputs:
        if each.sort == "adapter":
            with suppress(ConfigError):  # the part that loads it reports the fault
                yield from weights_below(locate_adapter(each.value), budget, prefix=prefix(each))


def _summary(files: tuple[HashedFile, ...]) -> dict[str, Any]:
    digest = new_digest()
    for file in sorted(files, key=lambda file: file.name):
        text = f"{file.name}\0{file.hash}\0{file.mtime_ns}\0{file.problem}\n"
        digest.update(text.encode("utf-8", "surrogateescape"))
    return {"digest": digest.hexdigest(), "num_files": len(files)}
