"""The configuration of the tinker backend: its options, the address of the service, and the keys that it refuses."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from retrain.api import Config, Problem
from retrain_tinker.losses import DRO

# Keys that need a factor by token or row, and the values that do.
NOT_WITH_DRO: dict[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("tis_cap", "is_bounds", "off_policy_mask"), bool),
    "aggregation": lambda value: value == "sequence_mean",
}


class TinkerOptions(BaseModel):
    """Options of the service's computations and time-outs, and of checkpoints."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    base_model: str = Field(
        default="",
        description="The model's name on the service, if it differs from [model] model: a self-hosted server names a "
        "model by the folder that it was started with.",
    )
    reduction: Literal["auto", "token_sum", "sequence_mean"] = Field(
        default="auto",
        description="Reduction of token losses by the service: token_sum (the hosted one) or sequence_mean (SkyRL-tx: "
        "the mean over each row, then over rows); auto = as the service reports.",
    )
    connect_timeout_s: float = Field(
        default=120.0, gt=0.0, description="Seconds for each call until the training client is ready."
    )
    timeout_s: float = Field(
        default=1800.0,
        gt=0.0,
        description="Seconds for every later call: all completions of a step, an optimizer step, a checkpoint.",
    )
    download_adapter: bool = Field(
        default=True,
        description="Download the PEFT adapter into each checkpoint; otherwise it only refers to the service.",
    )


def base_url_of(config: Config) -> str:
    """Return `[model] base_url`, or `TINKER_BASE_URL`, or "" for the hosted service."""
    return config.model.base_url or os.environ.get("TINKER_BASE_URL", "")


def problems_of(config: Config) -> list[Problem]:
    """Report keys that the service would ignore."""
    problems = []
    if config.lora.alpha:
        what, fix = "a Tinker service sets LoRA's alpha itself", "remove it; scale [training] lr instead"
        problems.append(Problem(code="tinker.fixed-alpha", where=config.place("lora.alpha"), what=what, fix=fix))
    inference = config.tables.get("inference")
    defaults = dict(type(inference)()) if inference is not None else {}
    for name, default in defaults.items():
        if (value := getattr(inference, name)) != default:
            what = f"{name} = {value!r} would have no effect: the service samples from its own weights"
            fix = f"remove it, or keep the default {default!r}; [model] base_url names the service"
            where = config.place(f"inference.{name}")
            problems.append(Problem(code="tinker.key-without-effect", where=where, what=what, fix=fix))
    for name, refused in NOT_WITH_DRO.items() if config.algorithm.loss == DRO else ():
        if refused(value := getattr(config.algorithm, name)):
            what, why = f"{name} = {value!r} does not go with the loss {DRO!r}", "the service's penalty has no factor"
            given = {"where": config.place(f"algorithm.{name}"), "what": what, "why": why}
            problems.append(Problem(code="tinker.dro-factor", fix='remove it, or use backend = "local"', **given))
    teacher = config.teacher
    has_teacher = bool(teacher.model or teacher.adapter) or teacher.engine != "pytorch"
    if has_teacher and config.training.temperature != 1.0:
        what = "a teacher needs temperature = 1.0: a Tinker service reports log-probabilities only at 1.0"
        where, fix = config.place("training.temperature"), "set it to 1.0"
        problems.append(Problem(code="tinker.teacher-temperature", where=where, what=what, fix=fix))
    return problems
