"""Samplers of prompts besides `uniform`: registers `thompson`, `curriculum` and `replay`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from retrain.kernel.declared import PluginSpec
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.errors import Problem

SAMPLERS = (  # name, factory, summary
    ("thompson", "Thompson", "Prompts whose chance to teach is largest in a draw from the posterior of each rate."),
    (
        "curriculum",
        "create",
        "Prompts in order of a difficulty field: a window that moves with the steps, or with the rate.",
    ),
    (
        "replay",
        "Replay",
        "The order of `uniform`, and prompts that taught nothing when seen and are forecast to do so now.",
    ),
)
BY_VERDICTS = ("thompson", "replay")


@hookimpl
def retrain_register_samplers(register: Callable[[PluginSpec], None]) -> None:
    for name, factory, summary in SAMPLERS:
        module = f"retrain.run.samplers.{name}"
        register(PluginSpec(name=name, summary=summary, factory=f"{module}:{factory}", params=f"{module}:Params"))


@hookimpl
def retrain_check_config(config: Config) -> list[Problem]:
    name: str = config.data.sampler
    rewards: dict[str, float] = config.reward.weights
    judged = {*(rewards or [config.reward.type])} != {"none"} or config.environment.provider
    params: dict[str, Any] = config.data.sampler_params
    by_rate = name == "curriculum" and params.get("moves_by") == "rate"
    if judged or not (by_rate or name in BY_VERDICTS):
        return []
    from retrain.kernel.errors import Problem  # only a faulty configuration needs it

    what = f"{name} goes by which completions are correct, and reward 'none' judges nothing"
    return [Problem(where=config.place("data.sampler"), what=what, fix='use sampler = "uniform", or a reward')]
