"""The test bench of a part: a toy configuration, resolved and built as a run does it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import tomli_w

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.context import PluginContext
from retrain.kernel.errors import ConfigError
from retrain.kernel.plugins.build import build_part
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.plugins.resolve import Found, resolve
from retrain.kernel.registry import Plugins
from retrain.kernel.types import NOTHING, Kind
from retrain.run.seed_sources import run_seeds
from retrain.run.tables import read_config, registered_tables
from retrain.testing.tokens import tokenizer_of, toy_model

FILE = "conformance.toml"
KEY_OF_KIND = {
    Kind.ADVANTAGE: "algorithm.advantage_mode",
    Kind.TRANSFORM: "algorithm.transform_mode",
    Kind.UNCERTAINTY: "algorithm.uncertainty_kind",
    Kind.ALGORITHM: "algorithm.algorithm_mode",
    Kind.RECIPE: "algorithm.recipe",
    Kind.LOSS: "algorithm.loss",
    Kind.DATA_SOURCE: "data.source",
    Kind.BACKEND: "backend.backend",
}
OPTIONS_OF_KIND = {
    Kind.ADVANTAGE: "algorithm.advantage_params",
    Kind.TRANSFORM: "algorithm.transform_params",
    Kind.LOSS: "algorithm.loss_params",
    Kind.DATA_SOURCE: "data.options",
    Kind.BACKEND: "backend.options",
    Kind.LAUNCHER: "campaign.launcher_options",
    Kind.SAMPLER: "data.sampler_params",
    Kind.REWARD: "reward.params",
    Kind.PLANNING_DETECTOR: "planning.params",
}
# Keys of tables that another distribution registers: set if the table exists, omitted without harm if it does not.
OPTIONAL_KEY_OF_KIND = {
    Kind.REWARD: "reward.type",
    Kind.ENVIRONMENT: "environment.provider",
    Kind.PLANNING_DETECTOR: "planning.detector",
    Kind.INFERENCE_ENGINE: "inference.engine",
    Kind.PACER: "backpressure.pacer",
    Kind.SAMPLER: "data.sampler",
    Kind.LAUNCHER: "campaign.launcher",
}
LISTS_OF_KIND = {Kind.RECORDER: "logging.recorders", Kind.HEALTH_MONITOR: "health.monitors"}
TOY_CREDIT = "retrain.testing.toy_credit"


@dataclass(slots=False, kw_only=True)
class Bench:
    """Everything that a check needs around one part; what it creates is released when the check ends."""

    kind: Kind
    name: str
    given: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    exits: ExitStack = field(default_factory=ExitStack)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.exits.__exit__(kind, error, trace)

    @cached_property
    def folder(self) -> Path:
        """A folder for this check only."""
        made = tempfile.TemporaryDirectory(prefix="retrain-conformance-", ignore_cleanup_errors=True)
        return Path(self.exits.enter_context(made))

    @cached_property
    def plugins(self) -> Plugins:
        """All installed plugins."""
        return load_plugins()

    @cached_property
    def config(self) -> Config:
        """The toy configuration with the caller's values; ConfigError when those are invalid."""
        return self.configure(NOTHING)

    def configure(self, more: Mapping[str, Any]) -> Config:
        """The configuration with the tables in `more` overriding everything else."""
        tables = registered_tables(self.plugins)
        document = self._base(set(tables))
        for layer in (self.given, more):
            for table, content in layer.items():
                for key, value in content.items():
                    document.setdefault(table, {})[key] = value
        self._name_part(document, tables)
        file = self.folder / FILE
        file.write_text(tomli_w.dumps(document), encoding="utf-8")
        config, problems = read_config(file, self.plugins, tables)
        if problems:
            raise ConfigError(*problems)
        return config

    def _base(self, tables: set[str]) -> dict[str, dict[str, Any]]:
        return {
            "model": {"model": toy_model(self.plugins), "lora_rank": 4},
            "backend": {"devices": "cpu"},
            "algorithm": {
                "advantage_mode": f"{TOY_CREDIT}.centred",
                "transform_mode": f"{TOY_CREDIT}.FLAT",
                "uncertainty_kind": f"{TOY_CREDIT}.surprisal",
            },
            "training": {
                "seed": 1,
                "max_steps": 4,
                "batch_size": 2,
                "group_size": 4,
                "max_tokens": 8,
                "temperature": 1.0,
                "lr": 1e-2,
            },
            "logging": {"log_dir": str(self.folder / "run")},
        }

    def _name_part(self, document: dict[str, dict[str, Any]], tables: Mapping[str, Any]) -> None:
        """Set the key under which a user would name the part."""
        key, many = KEY_OF_KIND.get(self.kind), LISTS_OF_KIND.get(self.kind, "")
        optional = OPTIONAL_KEY_OF_KIND.get(self.kind, "")
        for path, value in ((key, self.name), (optional, self.name), (many, [self.name])):
            table, _, name = (path or "").partition(".")
            if table in tables:
                document.setdefault(table, {})[name] = value

    @cached_property
    def found(self) -> Found:
        """The part's object, imported now; PluginError when no part has this name."""
        paths = self.config.plugins.search_paths
        return resolve(self.plugins, self.kind, self.name, where="conformance()", search_paths=paths)

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer of the configured model."""
        return tokenizer_of(self.config, self.plugins)

    def context(self, config: Config | None = None) -> PluginContext:
        """What the part's factory receives, apart from its parameters."""
        config = config or self.config
        tokenizer = None if self.kind is Kind.DATA_SOURCE else self.tokenizer
        seeds = run_seeds(config)
        return PluginContext(config=config, seeds=seeds, plugins=self.plugins, tokenizer=tokenizer)

    def build(
        self, options: Mapping[str, Any] | None = None, config: Config | None = None, given: Sequence[Any] = ()
    ) -> Any:
        """What the part's factory returns when called as in a run, with what else is `given` to factories of its kind.

        `options` replace the configured ones.
        """
        context = self.context(config)
        path = OPTIONS_OF_KIND.get(self.kind, "")
        chosen = options if options is not None else (context.config.value(path, {}) if path else {})
        where = KEY_OF_KIND.get(self.kind) or OPTIONAL_KEY_OF_KIND.get(self.kind) or f"{self.kind}.name"
        return build_part(self.kind, self.name, where, context, chosen, path, given)

    def closing(self, close: Callable[[], object]) -> None:
        """Call this when the check ends."""
        self.exits.callback(close)
