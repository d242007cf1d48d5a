"""Supervised steps before the first one: registers `[sft]`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from retrain.kernel.declared import MetricSpec, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl

if TYPE_CHECKING:
    from retrain.kernel.config.resolved import Config
    from retrain.kernel.errors import Problem
    from retrain.kernel.registry import Plugins

METRICS = (
    ("phase", "`sft`: a supervised step of [sft]. The fields below belong only to such lines.", "text"),
    ("sft_loss", "Minus the mean log-probability of the answers' tokens; null on a rejected step.", "nats"),
    ("sft_tokens", "Tokens of the answers, each with its end-of-turn token.", "tokens"),
    ("sft_grad_norm", "L2 norm of the gradient before clipping, where the backend reports it.", ""),
    ("sft_lr", "Learning rate, where the backend reports it.", ""),
    ("sft_left_out", "Examples that are not trained on: their answer is missing or too long.", "examples"),
    ("sft_time_s", "Time of the supervised step.", "s"),
)


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    summary, factory = (
        "Training on given answers before the first step.",
        "retrain.kernel.config.plugin_tables:SftTable",
    )
    register(PluginSpec(name="sft", summary=summary, factory=factory, traits=TableTraits(flag_prefix="sft_")))


@hookimpl
def retrain_describe_metrics() -> list[MetricSpec]:
    absent = "on all lines but [sft]'s"
    return [MetricSpec(name=name, meaning=text, unit=unit, absent=absent) for name, text, unit in METRICS]


@hookimpl
def retrain_check_config(config: Config, plugins: Plugins) -> Sequence[Problem]:
    if not config.sft.steps:
        return ()
    from retrain.credit.sft.warm_up import problems_of

    return problems_of(config, plugins)
