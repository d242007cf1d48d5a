"""`[campaign]` and `[campaign.plan]`: conditions x seeds, the hypothesis, and the analysis that decides."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from retrain.kernel.config.keys import Table, key
from retrain.kernel.config.resolved import Config, Layer
from retrain.kernel.declared import Kind
from retrain.records.tune_table import TuneTable

SUMMARIES = ("final", "best", "auc")
PAIRED = "paired"
UNSET = {"looks": [], "n_max": 0, "spend": "pocock"}  # left out of the seal: older plans lack them
STOP_RULE = "every run to max_steps; no run is stopped, added or left out because of its results"

SEEDS = [42, 101, 202, 303, 404, 505, 606, 707]
CONDITIONS = [
    {"advantage_mode": "grpo", "transform_mode": "none"},
    {"advantage_mode": "maxrl", "transform_mode": "none"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo_hicra"},
    {"advantage_mode": "maxrl", "transform_mode": "gtpo_sepa"},
]
SEED_END = 2**31
OVERRIDING = (Layer.ENVIRONMENT, Layer.COMMAND_LINE)


class PlanTable(Table):
    """The hypothesis and the analysis that decides; `retrain compare` reports every departure from it."""

    hypothesis: str = Field(min_length=1, description="The purpose of the campaign, in a sentence.")
    primary_metric: str = key(
        "eval_correct_rate:final", "Field of metrics.jsonl, and final, best or auc: the metric that decides."
    )
    alpha: float = key(0.05, "Chance of any false verdict over all comparisons together.", gt=0.0, lt=0.5)
    stop_rule: str = key(STOP_RULE, "When the campaign ends, in a sentence.", min_length=1)
    baseline: str = key("", "Label of the condition that the others are compared with; empty = the first.")
    direction: Literal["higher", "lower"] = key("higher", "Which side of the primary metric is better.")
    margin: float | None = key(
        None,
        "Differences below it, in units of the metric (0.02 = 2 pp of a rate), do not matter.",
        gt=0.0,
        allow_inf_nan=False,
    )
    test: Literal["paired", "unpaired"] = key(
        PAIRED, "Compares runs of one seed with each other, or all runs of two conditions whichever seeds they have."
    )
    looks: list[int] = key([], "Numbers of seeds after which the campaign looks and may stop; empty = at the end.")
    n_max: int = key(0, "With looks: the most seeds of a condition, equal to the last look; 0 = that.", ge=0)
    spend: Literal["pocock", "obrien_fleming"] = key(
        "pocock", "With looks: how alpha is spent over them, evenly (pocock) or mostly late (obrien_fleming)."
    )

    @field_validator("hypothesis", "stop_rule")
    @classmethod
    def _says_something(cls, text: str) -> str:
        if not text.strip():
            raise ValueError("it holds only spaces: write a sentence")
        return text

    @field_validator("primary_metric")
    @classmethod
    def _metric(cls, text: str) -> str:
        field, _, summary = text.partition(":")
        if not field or (summary or SUMMARIES[0]) not in SUMMARIES:
            raise ValueError(f"{text!r} is not FIELD or FIELD:SUMMARY with a summary of {', '.join(SUMMARIES)}")
        return f"{field}:{summary or SUMMARIES[0]}"

    @field_validator("looks")
    @classmethod
    def _ascending(cls, looks: list[int]) -> list[int]:
        if any(later <= earlier for earlier, later in pairwise([0, *looks])):
            raise ValueError(f"{looks} are not numbers of seeds in ascending order, such as [8, 12, 16, 20]")
        return looks

    @model_validator(mode="after")
    def _of_the_looks(self) -> Self:
        if not self.looks:
            for name, default in UNSET.items():
                if getattr(self, name) != default:
                    raise ValueError(f"{name} has no effect without looks, such as looks = [8, 12, 16, 20]")
            return self
        if self.test != PAIRED:
            raise ValueError('looks go with test = "paired" only')
        if self.n_max not in (0, self.looks[-1]):
            raise ValueError(f"n_max is {self.n_max} and the last look {self.looks[-1]}: they must be equal")
        if self.stop_rule not in (STOP_RULE, self.written_stop_rule):
            raise ValueError("stop_rule is written by the plan when it has looks: remove it")
        return self

    @property
    def written_stop_rule(self) -> str:
        """The stop rule that follows from the looks."""
        *first, last = map(str, self.looks)
        after = f"{', '.join(first)} and {last}" if first else last
        return (
            f"looks after {after} seeds; a condition gets no more once its verdict is in ({self.spend} spending of "
            f"alpha {self.alpha:g}) or its chance of one by {last} falls below 5 %; the campaign ends with the last"
        )

    def content(self) -> dict[str, Any]:
        """Return the plan as plain data, without keys of later versions that it does not use."""
        values: dict[str, Any] = self.model_dump(mode="json")
        if self.looks:
            values |= {"n_max": self.looks[-1], "stop_rule": self.written_stop_rule}
        left_out = {name for name, value in values.items() if value is None} | (set() if self.looks else set(UNSET))
        left_out |= {"test"} if self.test == PAIRED else set()
        return {name: value for name, value in values.items() if name not in left_out}


def is_campaign(config: Config) -> bool:
    return any(path.startswith("campaign.") and found.layer is Layer.FILE for path, found in config.origins.items())


class CampaignTable(Table):
    """A grid of conditions x seeds."""

    seeds: list[int] = key(SEEDS, "Root seed of each run of a condition.")
    max_steps: int = key(500, "Steps per run; overrides [training] max_steps.", ge=1)
    parallel: bool = key(False, "Several runs at a time.", free_on_resume=True)
    max_workers: int = key(
        0, "With parallel: runs at a time; 0 = all.", ge=0, free_on_resume=True, needs="campaign.parallel"
    )
    stagger_seconds: float = key(0.0, "Delay between launches.", ge=0.0, free_on_resume=True)
    conditions: list[dict[str, Any]] = key(
        CONDITIONS, "Conditions; each names advantage_mode and transform_mode, or a recipe, and may set any key."
    )
    factors: dict[str, list[Any]] = key(
        {}, "In place of conditions: keys and their levels; each combination is a condition, the first the baseline."
    )
    lr_factors: list[float] = key([], "Run each condition at these multiples of its learning rate, too.")
    controls: list[Literal["random_reward", "format_only", "no_update"]] = key(
        [], "Controls that each condition but the baseline must beat, too: a run each per seed."
    )
    retries: int = key(1, "Further attempts of a run that failed.", ge=0, free_on_resume=True)
    launcher: str = key(
        "subprocess",
        "The launcher of the runs: subprocess, ray, slurm or a plugin.",
        names=Kind.LAUNCHER,
        free_on_resume=True,
    )
    launcher_options: dict[str, Any] = key({}, "Options of the launcher.", free_on_resume=True)
    devices_per_run: int = key(1, "Number of [backend] devices for each run, when several are listed.", ge=1)
    plan: PlanTable | None = key(None, "The question of the campaign, sealed before its first step.")
    tune: TuneTable | None = key(None, "The search for each condition's settings before its final runs.")

    @field_validator("seeds")
    @classmethod
    def _usable(cls, seeds: list[int]) -> list[int]:
        if not seeds:
            raise ValueError("at least one seed is needed")
        if bad := [seed for seed in seeds if not 0 <= seed < SEED_END]:
            raise ValueError(f"{bad[0]} is not a seed: 0 to {SEED_END - 1}")
        return seeds

    @field_validator("factors")
    @classmethod
    def _crossed(cls, factors: dict[str, list[Any]]) -> dict[str, list[Any]]:
        for name, levels in factors.items():
            if len(levels) < 2 or any(levels.count(level) > 1 for level in levels):
                raise ValueError(f"{name} needs two or more different levels")
        return factors

    @field_validator("lr_factors")
    @classmethod
    def _positive(cls, factors: list[float]) -> list[float]:
        if bad := [factor for factor in factors if factor <= 0.0]:
            raise ValueError(f"{bad[0]:g} is not positive")
        return factors

    @field_validator("seeds", "controls", "lr_factors")
    @classmethod
    def _once(cls, values: list[Any]) -> list[Any]:
        if twice := [each for each in values if values.count(each) > 1]:
            raise ValueError(f"{twice[0]} is listed more than once")
        return values

    @field_validator("conditions")
    @classmethod
    def _complete(cls, conditions: list[dict[str, Any]]) -> list[dict[str, Any]]:
        if not conditions:
            raise ValueError("at least one condition is needed; omit the key for the five default ones")
        for number, condition in enumerate(conditions, start=1):
            for name in ("recipe",) if "recipe" in condition else ("advantage_mode", "transform_mode"):
                if not isinstance(condition.get(name), str) or not condition[name]:
                    raise ValueError(f"condition {number} needs {name}")
        return conditions

    @model_validator(mode="after")
    def _one_design(self) -> Self:
        # A resumed campaign's file has the default conditions, too.
        if self.factors and (self.conditions != CONDITIONS or self.lr_factors):
            raise ValueError("factors make all conditions: remove conditions and lr_factors")
        return self


def steps_per_run(config: Config) -> int:
    """`[campaign] max_steps`, unless only `[training]` sets it or the command line does."""
    own, base = config.origin("campaign.max_steps"), config.origin("training.max_steps")
    is_base = base.layer in OVERRIDING or (own.layer is Layer.DEFAULT and base.layer is not Layer.DEFAULT)
    steps = config.training.max_steps
    return steps if is_base and own.layer not in OVERRIDING else config.table("campaign", CampaignTable).max_steps
