"""One training run on this machine: its parts assembled, its steps, samplers and pacing, resume, signals.

Begin with `session.py`, the entry for commands, and `assemble.py`; a killed run comes back in `restore.py`, by the plan
of `resume_plan.py`. Imports no watcher: they come through hooks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from retrain.kernel.declared import MetricSpec, PluginSpec, TableTraits
from retrain.kernel.errors import Problem
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.algorithm import Shaper
    from retrain.kernel.contracts.context import PluginContext

SAMPLERS = (  # name, factory in `samplers`, summary
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
OVERLONG = {"mask": "left out of the loss", "drop": "left out of the loss and of the baseline"}


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    factory, traits = "retrain.kernel.config.plugin_tables:BackpressureTable", TableTraits(flag_prefix="bp_")
    register(PluginSpec(name="backpressure", summary="Adaptive batch sizing.", factory=factory, traits=traits))


@hookimpl
def retrain_register_pacers(register: Callable[[PluginSpec], None]) -> None:
    summary = "Steers to a fraction of the peak of the fitted Universal Scalability Law."
    register(PluginSpec(name="usl", summary=summary, factory="retrain.run.backpressure:build"))


@hookimpl
def retrain_register_samplers(register: Callable[[PluginSpec], None]) -> None:
    summary = "Every prompt once per pass, in a seeded order that is new in each."
    register(PluginSpec(name="uniform", summary=summary, factory="retrain.tasks.sampling:Uniform"))
    for name, factory, summary in SAMPLERS:
        module = f"retrain.run.samplers.{name}"
        register(PluginSpec(name=name, summary=summary, factory=f"{module}:{factory}", params=f"{module}:Params"))


@hookimpl
def retrain_describe_metrics() -> Iterable[MetricSpec]:
    from retrain.run import backpressure
    from retrain.run.steps import learned_order

    return (*backpressure.METRICS, *learned_order.METRICS)


@hookimpl
def retrain_check_config(config: Config) -> list[Problem]:
    zone, limit, problems = config.training.soft_overlong, config.training.max_tokens, list[Problem]()
    if config.training.control:
        from retrain.run.steps.controls import control_problems  # only a control needs it

        problems += control_problems(config)
    if zone > limit:
        what = f"{zone} tokens, but a completion has at most max_tokens = {limit}"
        fix = f"lower it, for example to {limit // 5}"
        where = config.place("training.soft_overlong")
        problems.append(Problem(code="config.zone-too-long", where=where, what=what, fix=fix))
    rewards, sampler = config.reward.weights or {config.reward.type: 1.0}, config.data.sampler
    is_judged = {*rewards} != {"none"} or config.environment.provider
    by_rate = sampler == "curriculum" and config.data.sampler_params.get("moves_by") == "rate"
    if not is_judged and (by_rate or sampler in BY_VERDICTS):
        what = f"{sampler} needs to know which completions are correct, and reward 'none' judges nothing"
        fix = 'use sampler = "uniform", or a reward'
        problems.append(Problem(code="reward.judges-nothing", where=config.place("data.sampler"), what=what, fix=fix))
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
        from retrain.run.steps.overlapped import meaning  # only a lead that is set needs it

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
    # Most runs keep truncated completions unpunished and never load this.
    from retrain.credit.overlong import SoftPunishment

    return (SoftPunishment(limit=context.config.training.max_tokens, zone=zone),)
