"""One training run on this machine: its parts assembled, its steps, samplers and pacing, resume, signals.

Begin with `session.py`, the entry for commands, and `assemble.py`; a killed run comes back in `restore.py`, by the plan
of `resume_plan.py`. Imports no watcher: they come through hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from retrain.kernel.declared import MetricSpec, PluginSpec
from retrain.kernel.errors import Problem
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.algorithm import Shaper
    from retrain.kernel.contracts.context import PluginContext

OVERLONG = {"mask": "left out of the loss", "drop": "left out of the loss and of the baseline"}


@hookimpl
def retrain_register_samplers(register: Callable[[PluginSpec], None]) -> None:
    summary = "Every prompt once per pass, in a seeded order that is new in each."
    register(PluginSpec(name="uniform", summary=summary, factory="retrain.tasks.sampling:Uniform"))


@hookimpl
def retrain_describe_metrics() -> Iterable[MetricSpec]:
    from retrain.run.steps.learned_order import METRICS

    return METRICS


@hookimpl
def retrain_check_config(config: Config) -> list[Problem]:
    zone, limit, problems = config.training.soft_overlong, config.training.max_tokens, list[Problem]()
    if config.training.control:
        from retrain.run.steps.controls import control_problems  # only a control needs it

        problems += control_problems(config)
    if zone > limit:
        what = f"{zone} tokens, but a completion has at most max_tokens = {limit}"
        fix = f"lower it, for example to {limit // 5}"
        problems.append(Problem(where=config.place("training.soft_overlong"), what=what, fix=fix))
    return problems


@hookimpl
def retrain_explain(config: Config) -> dict[str, str]:
    overlong, refill = config.training.overlong, config.training.refill
    zone, size = config.training.soft_overlong, config.training.batch_size
    rows = {"truncated": OVERLONG[overlong]} if overlong != "keep" else {}
    if zone:
        limit = config.training.max_tokens
        rows["soft_overlong"] = f"the reward falls by up to 1 over the last {zone} of {limit} tokens"
    if config.training.max_staleness != -1:
        from retrain.run.steps.staleness import meaning

        rows |= {"staleness": meaning(config)}
    if control := config.training.control:
        from retrain.records.run import Control
        from retrain.run.steps.controls import MEANINGS

        rows |= {"control": f"{control}: {MEANINGS[Control(control)]}; evaluation is as in any run"}
    rounds = f"{refill} further round{'s' if refill > 1 else ''}"
    return rows | ({"refill": f"up to {rounds} of {size} prompts until {size} groups can teach"} if refill else {})


@hookimpl
def retrain_shape_rewards(context: PluginContext) -> Sequence[Shaper]:
    if not (zone := context.config.training.soft_overlong):
        return ()
    from retrain.credit.overlong import SoftPunishment  # only a run that punishes needs it

    return (SoftPunishment(limit=context.config.training.max_tokens, zone=zone),)
