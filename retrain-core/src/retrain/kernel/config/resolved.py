"""The resolved configuration: one validated model per table, and the origin of every value."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar, cast

from pydantic import BaseModel

from retrain.kernel.config import schema

Model = TypeVar("Model", bound=BaseModel)
T = TypeVar("T")


class Layer(StrEnum):
    """Where a value can come from; a later layer wins."""

    DEFAULT = "default"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every table of a run. Kernel tables are properties; others are asked for by path with `value`."""

    tables: Mapping[str, BaseModel]
    origins: Mapping[str, Origin] = field(default_factory=dict)  # "table.key" -> origin, only what is not a default
    source: str = ""
    foreign_tables: frozenset[str] = frozenset()  # not part of what a run is: not built yet, or about many runs

    def table(self, name: str, model: type[Model]) -> Model:
        """A table as its own model; defaults when nobody registered the table."""
        found = self.tables.get(name)
        return found if isinstance(found, model) else model()

    def value(self, path: str, default: T) -> T:
        """One value by `table.key`; `default` when nobody registered that table or key."""
        table_name, _, name = path.partition(".")
        table = self.tables.get(table_name)
        return cast(T, getattr(table, name, default)) if table is not None else default

    def origin(self, path: str) -> Origin:
        """Where the value of `table.key` came from."""
        return self.origins.get(path, DEFAULT_ORIGIN)

    def place(self, path: str) -> str:
        """Where to look for a value, for messages: `retrain.toml:12 [training] lr`."""
        table, _, name = path.partition(".")
        origin = self.origin(path)
        return f"{origin} [{table}] {name}" if origin.place else f"[{table}] {name} (default)"

    def as_dict(self) -> dict[str, dict[str, Any]]:
        """Plain data, table by table, with TOML names."""
        return {
            name: table.model_dump(mode="json", by_alias=True, exclude_none=True) for name, table in self.tables.items()
        }

    @property
    def backend(self) -> schema.BackendTable:
        """`[backend]`."""
        return self.table("backend", schema.BackendTable)

    @property
    def model(self) -> schema.ModelTable:
        """`[model]`."""
        return self.table("model", schema.ModelTable)

    @property
    def algorithm(self) -> schema.AlgorithmTable:
        """`[algorithm]`."""
        return self.table("algorithm", schema.AlgorithmTable)

    @property
    def plugins(self) -> schema.PluginsTable:
        """`[plugins]`."""
        return self.table("plugins", schema.PluginsTable)

    @property
    def training(self) -> schema.TrainingTable:
        """`[training]`."""
        return self.table("training", schema.TrainingTable)

    @property
    def optimizer(self) -> schema.OptimizerTable:
        """`[optimizer]`."""
        return self.table("optimizer", schema.OptimizerTable)

    @property
    def lora(self) -> schema.LoraTable:
        """`[lora]`."""
        return self.table("lora", schema.LoraTable)

    @property
    def data(self) -> schema.DataTable:
        """`[data]`."""
        return self.table("data", schema.DataTable)

    @property
    def scoring(self) -> schema.ScoringTable:
        """`[scoring]`."""
        return self.table("scoring", schema.ScoringTable)

    @property
    def eval(self) -> schema.EvalTable:
        """`[eval]`."""
        return self.table("eval", schema.EvalTable)

    @property
    def logging(self) -> schema.LoggingTable:
        """`[logging]`."""
        return self.table("logging", schema.LoggingTable)
