"""The resolved configuration: one validated model per table, and the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel

from retrain.kernel.config import plugin_tables, schema
from retrain.kernel.errors import ConfigError, Problem

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


class Layer(StrEnum):
    """Sources of a value; a later one overrides an earlier one."""

    DEFAULT = "default"
    RECIPE = "recipe"
    FILE = "file"
    ENVIRONMENT = "environment"
    COMMAND_LINE = "command line"


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Layer and place of one value, `retrain.toml:12`, `RETRAIN__TRAINING__LR` or `--lr`."""

    layer: Layer
    place: str = ""

    def __str__(self) -> str:
        return self.place or self.layer.value


DEFAULT_ORIGIN = Origin(layer=Layer.DEFAULT)


class _TableOf(Generic[Model]):
    """`config.NAME`: the table of this name, typed as its model."""

    def __init__(self, model: type[Model]) -> None:
        self._model = model

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, config: Config, owner: type) -> Model:
        return config.table(self._name, self._model)


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every table of a run, as attributes; `table` gives the tables of other plugins as their model."""

    tables: Mapping[str, BaseModel]
    # By `table.key`; a default has no entry.
    origins: Mapping[str, Origin] = field(default_factory=dict)
    source: str = ""
    # Tables about many runs; a single run has no use for them.
    foreign_tables: frozenset[str] = frozenset()
    # Of a run that is opened again: the folder where its names are looked up; `table.key` -> value as written,
    # where the value is now a recorded place; and its inputs that are nowhere, by `table.key.entry`.
    folder: str = ""
    written: Mapping[str, Any] = field(default_factory=dict)
    lost: Mapping[str, Problem] = field(default_factory=dict)

    def table(self, name: str, model: type[Model]) -> Model:
        """A table as its model; defaults when no plugin registered the table."""
        found = self.tables.get(name)
        return found if isinstance(found, model) else model()

    def value(self, path: str, default: T) -> T:
        """One value by `table.key`, for keys that another distribution brings; `default` when none registered it."""
        table_name, _, name = path.partition(".")
        table = self.tables.get(table_name)
        return cast(T, getattr(table, name, default)) if table is not None else default

    def origin(self, path: str) -> Origin:
        return self.origins.get(path, DEFAULT_ORIGIN)

    def place(self, path: str) -> str:
        """Place of a value, for messages: `retrain.toml:12 [training] lr`."""
        table, _, name = path.partition(".")
        origin = self.origin(path)
        return f"{origin} [{table}] {name}" if origin.place else f"[{table}] {name} (default)"

    def refuse_lost(self, *paths: str) -> None:
        """ConfigError when an input under one of these tables or keys is `lost`; call it before loading them."""
        if problems := [self.lost[path] for path in self.lost if f"{path}.".startswith(tuple(f"{p}." for p in paths))]:
            raise ConfigError(*problems)

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data, table by table, with TOML names."""
        return {
            name: table.model_dump(mode="json", by_alias=True, exclude_none=True) for name, table in self.tables.items()
        }

    backend = _TableOf(schema.BackendTable)
    model = _TableOf(schema.ModelTable)
    algorithm = _TableOf(schema.AlgorithmTable)
    plugins = _TableOf(schema.PluginsTable)
    training = _TableOf(schema.TrainingTable)
    optimizer = _TableOf(schema.OptimizerTable)
    lora = _TableOf(schema.LoraTable)
    data = _TableOf(schema.DataTable)
    scoring = _TableOf(schema.ScoringTable)
    eval = _TableOf(schema.EvalTable)
    logging = _TableOf(schema.LoggingTable)
    resume = _TableOf(schema.ResumeTable)
    inference = _TableOf(plugin_tables.InferenceTable)
    reward = _TableOf(plugin_tables.RewardTable)
    environment = _TableOf(plugin_tables.EnvironmentTable)
    planning = _TableOf(plugin_tables.PlanningTable)
    teacher = _TableOf(plugin_tables.TeacherTable)
    distil = _TableOf(plugin_tables.DistilTable)
    sft = _TableOf(plugin_tables.SftTable)
    kl = _TableOf(plugin_tables.KlTable)
    entropy = _TableOf(plugin_tables.EntropyTable)
    backpressure = _TableOf(plugin_tables.BackpressureTable)
