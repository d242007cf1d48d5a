"""Puts the fields of a step together for its line in `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from retrain.kernel.contracts.serving import Measuring
from retrain.kernel.overlap import samples_ahead
from retrain.kernel.types import Group, TrainReport
from retrain.rooms.credit.batch import Credited
from retrain.rooms.metrics.metrics import group_metrics, length_metrics, reward_metrics, token_metrics, train_metrics
from retrain.rooms.metrics.step_records import merge_fields
from retrain.rooms.session.assemble import Parts

Extras = Callable[[], Iterable[Mapping[str, Any] | None]]


def step_metrics(
    parts: Parts,
    step: int,
    groups: tuple[Group, ...],
    credited: Credited,
    report: TrainReport | None,
    *,
    sepa_lambda: float,
    running_rate: float,
    extras: Extras,
) -> dict[str, Any]:
    """Every field of a step but its times and evaluation; `extras` gives the fields of plugins."""
    flow, capabilities, training = parts.flow, parts.backend.capabilities, parts.config.training
    metrics: dict[str, Any] = {
        **step_head(parts, step),
        "backend_reports_sync_loss": capabilities.reports_sync_loss,
        "backend_preserves_token_advantages": capabilities.preserves_token_advantages,
        **train_metrics(report),
        **reward_metrics(groups),
        "running_correct_rate": running_rate,
        **group_metrics(credited.statuses),
        "sepa_lambda": sepa_lambda,
        "num_datums": len(credited.batch.rows) if report else 0,
        **length_metrics(groups),
        **token_metrics(credited, flow.uncertainty.name),
        "batch_size": len(groups),
        "group_size": training.group_size,
    }
    if parts.controller:
        metrics = merge_fields(metrics, parts.controller.metrics(), source=f"controller {flow.controller!r}")
    metrics = merge_fields(metrics, credited.result.metrics, source=flow.condition)
    if isinstance(parts.backend, Measuring) and not samples_ahead(parts.backend):  # else it was asked after sampling
        metrics = merge_fields(metrics, parts.backend.metrics(), source=f"backend {parts.config.backend.backend!r}")
    for extra in extras():
        metrics = merge_fields(metrics, extra or {}, source="a plugin")
    return metrics


def step_head(parts: Parts, step: int) -> dict[str, Any]:
    """The fields that say which step of what this is."""
    flow = parts.flow
    return {
        "step": step,
        "algorithm_mode": parts.config.algorithm.algorithm_mode,
        "advantage_mode": flow.advantage.name,
        "transform_mode": flow.transform.name,
        "uncertainty_kind": flow.uncertainty.name,
        "condition": flow.condition,
    }
