"""KL to a reference policy, in the reward or in the loss, and the keys of terms against a collapse of the entropy.

Registers `[kl]` and `[entropy]`, and shapes a run's rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from retrain.kernel.declared import MetricSpec, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.contracts.algorithm import Shaper
    from retrain.kernel.contracts.backend import Backend
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.errors import Problem
    from retrain.kernel.registry import Plugins

UNMEASURED = "with log = false; where the backend has no reference; without a verdict"


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    for name, summary, model in (
        ("kl", "KL divergence from the model that training began with.", "KlTable"),
        ("entropy", "Terms against a collapse of the entropy.", "EntropyTable"),
    ):
        traits = TableTraits(flag_prefix=f"{name}_")
        factory = f"retrain.kernel.config.plugin_tables:{model}"
        register(PluginSpec(name=name, summary=summary, factory=factory, traits=traits))


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    mean = "Mean over action tokens of k3 between the sampling policy and its reference: an estimate >= 0 of the KL."
    return [
        MetricSpec(name="kl_mean", meaning=mean, unit="nats", absent=UNMEASURED),
        MetricSpec(
            name="kl_k1_mean",
            meaning="Mean of log p - log p_ref over the same tokens: the KL too, of either sign, with a shorter tail.",
            unit="nats",
            absent=UNMEASURED,
        ),
        MetricSpec(name="kl_coef", meaning="Weight of the KL in this step.", unit="", absent="with [kl] coef = 0"),
        MetricSpec(
            name="kl_penalty_mean",
            meaning="Amount that the KL takes off a completion's reward, mean over completions with a verdict.",
            unit="",
            absent='unless [kl] where = "reward"',
        ),
    ]


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> Sequence[Problem]:
    from retrain.kernel.config.plugin_tables import EntropyTable, KlTable

    if (config.kl, config.entropy) == (KlTable(), EntropyTable()):
        return []
    from retrain.credit.kl.check import problems_of

    return problems_of(config, plugins)


@hookimpl
def retrain_shape_rewards(context: PluginContext, backend: Backend) -> Sequence[Shaper] | None:
    from retrain.credit.flow import build_flow
    from retrain.credit.kl.shaper import shaper_of  # only a run needs them

    flow = build_flow(context.config, context.plugins)
    return shaper_of(context.config, backend, by_token=flow.needs_token_rewards, needs_verdict=flow.needs_verdict)
