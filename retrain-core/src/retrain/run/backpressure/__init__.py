"""Back pressure: adapts the batch size to measured throughput. Off by default; see `docs/pages/your-model.md`.

Registers `[backpressure]` and the pacer `usl`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from retrain.kernel.declared import MetricSpec, PluginSpec, TableTraits
from retrain.kernel.hooks import hookimpl


@hookimpl
def retrain_register_config_tables(register: Callable[[PluginSpec], None]) -> None:
    traits = TableTraits(flag_prefix="bp_")
    factory = "retrain.kernel.config.plugin_tables:BackpressureTable"
    register(PluginSpec(name="backpressure", summary="Adaptive batch sizing.", factory=factory, traits=traits))


@hookimpl
def retrain_register_pacers(register: Callable[[PluginSpec], None]) -> None:
    summary = "Steers to a fraction of the peak of the fitted Universal Scalability Law."
    register(PluginSpec(name="usl", summary=summary, factory="retrain.run.backpressure.controller:build"))


@hookimpl
def retrain_describe_metrics() -> Iterable[MetricSpec]:
    from retrain.run.backpressure.metric_names import METRICS

    return METRICS
