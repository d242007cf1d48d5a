"""`[campaign.tune]`: the keys that are tuned, the budget of each condition, and the rule of choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import ConfigDict, model_validator

from retrain.kernel.config.keys import Table, key

PER_SEED = "per_seed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The values of one key, `path`: from `low` to `high`, or one of `choices`."""

    path: str
    low: float = 0.0
    high: float = 0.0
    is_log: bool = False
    is_whole: bool = False
    choices: tuple[Any, ...] = ()

    @property
    def samples(self) -> Sequence[Any]:
        """Values that must all be legal: the ends, or every choice."""
        return self.choices or (self.low, self.high)

    def __str__(self) -> str:
        return f"{self.low:g} to {self.high:g}" if not self.choices else ", ".join(map(str, self.choices))


class TuneTable(Table):
    """The search before the final runs, with the same budget for each condition.

    Every entry that is a table is a key with its values: `"training.lr" = { low = 1e-5, high = 1e-3, log = true }`.
    """

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "object"}})

    keys: dict[str, dict[str, Any]] = key({}, "Tuned keys, each with low, high and log, or with choices.")
    runs: int = key(0, "Tuning runs of each condition.")
    tokens: int = key(0, "In place of runs: tokens that the tuning runs of each condition may sample.")
    seeds: list[int] = key([1], "Root seeds of each configuration's runs; none of them is a final seed.")
    choice: Literal["per_seed", "best"] = key(
        PER_SEED, "Deal the configurations to the final seeds, each with a choice, or choose one for all seeds (best)."
    )
    metric: str = key("", "Metric that chooses, on the tuning examples; empty = the plan's, or the held-out rate.")
    examples: int = key(0, "Tuning examples, apart from the held-out ones; 0 = as many as [eval] examples.", ge=0)
    sampler: Literal["random", "quasi_random", "tpe"] = key("random", "Search by Optuna.")
    pruner: Literal["none", "halving"] = key("none", "Stop the worse configurations early by successive halving.")
    min_steps: int = key(1, "With halving: steps before the first decision.", ge=1)
    reduction_factor: int = key(3, "With halving: one configuration in so many continues.", ge=2)
    search_seed: int = key(0, "Seed of the search; conditions share it, so they try the same random values.", ge=0)

    @model_validator(mode="before")
    @classmethod
    def _keys_by_path(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        named = {name: value for name, value in values.items() if isinstance(value, Mapping) and name != "keys"}
        others = {name: value for name, value in values.items() if name not in named}
        listed = others.get("keys", {})
        return others | {"keys": {**listed, **named} if isinstance(listed, Mapping) else listed}

    @property
    def is_per_seed(self) -> bool:
        return self.choice == PER_SEED

    def num_choices(self, num_seeds: int) -> int:
        """Choices of each condition, which share its budget."""
        return num_seeds if self.is_per_seed else 1

    def rungs(self, max_steps: int) -> list[int]:
        """Steps after which a configuration is judged."""
        steps = [self.min_steps] if self.pruner == "halving" else [max_steps]
        while steps[-1] * self.reduction_factor < max_steps:
            steps.append(steps[-1] * self.reduction_factor)
        return [*(each for each in steps if each < max_steps), max_steps]
