"""Asks the pacer, if there is one, how many prompts a step draws, and tells it what came of it."""

from __future__ import annotations

from typing import Any

from retrain.kernel.config.schema import TrainingTable
from retrain.kernel.contracts.pacing import Pacer, PaceView
from retrain.kernel.errors import PluginError, Problem
from retrain.rooms.metrics.step_records import merge_fields


class Pace:
    """The batch size of each step: `[training] batch_size`, or what the pacer says."""

    def __init__(self, pacer: Pacer | None, training: TrainingTable) -> None:
        self._pacer = pacer
        self._training = training

    def batch_size(self, step: int) -> int:
        """Prompts of the coming step; PluginError when the pacer wants none."""
        size = self._pacer.batch_size(step) if self._pacer else self._training.batch_size
        if size < 1:
            raise PluginError(Problem(what=f"the pacer wants {size} prompts at step {step}", fix="return at least 1"))
        return size

    def observed(self, metrics: dict[str, Any], batch_size: int, *, has_trained: bool) -> dict[str, Any]:
        """The fields of a finished step, timing included, with those of the pacer, which has seen them."""
        if self._pacer is None:
            return metrics
        view = PaceView(
            step=int(metrics["step"]),
            batch_size=batch_size,
            group_size=self._training.group_size,
            sampled_tokens=int(metrics.get("sampled_tokens", 0)),
            step_time_s=float(metrics["step_time_s"]),
            has_trained=has_trained,
        )
        self._pacer.observe(view)
        return merge_fields(metrics, self._pacer.metrics(), source="the pacer")

    def backs_off(self, step: int, failed: int) -> bool:
        """Whether a step that ran out of memory, and changed nothing, is to be tried again with fewer prompts."""
        if self._pacer is None:
            return False
        group_size = self._training.group_size
        self._pacer.observe(PaceView(step=step, batch_size=failed, group_size=group_size, out_of_memory=True))
        return self.batch_size(step) < failed
