"""The pacer `usl`: sets the number of prompts of the next step from the throughput of earlier steps."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from retrain.kernel.config.plugin_tables import BackpressureTable
from retrain.run.backpressure.roofline import UNKNOWN, WARMUP, Roofline, regime
from retrain.run.backpressure.samples import Sample, Window
from retrain.run.backpressure.usl import UNBOUNDED, Scaling, fit_usl

if TYPE_CHECKING:
    from retrain.kernel.contracts.context import PluginContext
    from retrain.kernel.contracts.pacing import PaceView

LOG = logging.getLogger("retrain")
HOLD, INCREASE, THROTTLE = "hold", "increase", "throttle"
LENGTH_DECAY = 0.8  # of the mean completion length that selects comparable samples: about the last five steps


def build(context: PluginContext) -> UslPacer:
    """The pacer that `[backpressure]` describes, beginning at `[training] batch_size`."""
    config = context.config
    table = config.backpressure
    batch_size = config.training.batch_size
    pacer = UslPacer(table, batch_size=batch_size, group_size=config.training.group_size)
    LOG.info(
        "Back pressure: the batch size follows measured throughput, between %d and %d prompts; measured times differ "
        "from run to run, so a seed alone does not reproduce this run.",
        table.min_batch_size,
        table.max_batch_size,
    )
    if pacer.configured != batch_size:
        LOG.warning("Back pressure: [training] batch_size = %d is outside these bounds.", batch_size)
    return pacer


class UslPacer:
    """Sweeps 1, 2, 4, ... prompts, fits the curve, and steers to `throttle_margin` of its peak.

    With p = batch size x group size and target = throttle_margin p*: p > target throttles to the target, p <
    increase_margin x target increases to it, anything between holds. Throttling never raises the batch size and
    increasing never lowers it. Running out of memory sets a permanent ceiling. `group_size` never changes.
    """

    def __init__(self, table: BackpressureTable, *, batch_size: int, group_size: int) -> None:
        self._table = table
        self._group_size = group_size
        self.configured = min(max(batch_size, table.min_batch_size), table.max_batch_size)
        peaks = table.peak_gflops, table.peak_bw_gb_s
        self._roofline = Roofline(peak_gflops=peaks[0], peak_bw_gb_s=peaks[1]) if min(peaks) > 0.0 else None
        self._sweep = _sweep(table.min_batch_size, table.max_batch_size)
        self._window = Window()
        self._batch_size = self.configured
        self._ceiling = table.max_batch_size
        self._largest_worked = 0
        self._steps = 0
        self._action = HOLD
        self._throughput = 0.0
        self._mean_tokens = 0.0
        self._fit: Scaling | None = None
        self._p = 0
        self._is_cold = True  # the first step of a process compiles, allocates and reads files: its time means nothing

    def batch_size(self, step: int) -> int:
        """Prompts of the next step; constant until the next `observe`."""
        if self._steps < self._table.warmup_steps:
            return min(self._sweep[self._steps % len(self._sweep)], self._ceiling)
        return self._batch_size

    def observe(self, view: PaceView) -> None:
        """Learn from a step; one without an optimizer step only advances the sweep."""
        self._p = view.batch_size * view.group_size
        if view.out_of_memory:
            self._lower_ceiling(view.batch_size)
            return
        self._steps += 1
        if view.has_trained and view.sampled_tokens > 0 and view.step_time_s > 0.0:
            self._measure(view)
        self._fit = fit_usl(self._window.comparable(self._mean_tokens), relative=True)
        self._action = HOLD
        if self._steps >= self._table.warmup_steps:
            self._decide()

    def metrics(self) -> Mapping[str, float | str | bool]:
        """`bp_*` for the line of the last observed step; a field is absent until it is known."""
        is_warmup = self._steps <= self._table.warmup_steps
        fields: dict[str, float | str | bool] = {
            "bp_warmup": is_warmup,
            "bp_action": self._action,
            "bp_regime": self._regime(is_warmup),
        }
        if self._throughput > 0.0:
            fields["bp_throughput"] = self._throughput
        if self._fit is not None:
            fields |= {"bp_sigma": self._fit.sigma, "bp_kappa": self._fit.kappa}
            if self._fit.p_star != UNBOUNDED:
                fields |= {"bp_p_star": self._fit.p_star, "bp_utilization": self._p / self._fit.p_star}
        if self._ceiling < self._table.max_batch_size:
            fields["bp_ceiling"] = self._ceiling
        return fields

    def state(self) -> Mapping[str, Any]:
        """Everything that a resume needs, as JSON."""
        return {
            "batch_size": self._batch_size,
            "ceiling": self._ceiling,
            "largest_worked": self._largest_worked,
            "steps": self._steps,
            "action": self._action,
            "throughput": self._throughput,
            "mean_tokens": self._mean_tokens,
            "p": self._p,
            "samples": self._window.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned, within the bounds of the current configuration."""
        table = self._table
        self._ceiling = min(max(int(state["ceiling"]), table.min_batch_size), table.max_batch_size)
        self._batch_size = min(max(int(state["batch_size"]), table.min_batch_size), self._ceiling)
        self._largest_worked = int(state["largest_worked"])
        self._steps = int(state["steps"])
        self._action = str(state["action"])
        self._throughput = float(state["throughput"])
        self._mean_tokens = float(state["mean_tokens"])
        self._p = int(state["p"])
        self._window = Window.of_state(state["samples"])
        self._fit = fit_usl(self._window.comparable(self._mean_tokens), relative=True)

    def _measure(self, view: PaceView) -> None:
        self._largest_worked = max(self._largest_worked, view.batch_size)
        if self._is_cold:
            self._is_cold = False
            return
        throughput = view.sampled_tokens / view.step_time_s
        length = view.sampled_tokens / self._p
        self._throughput = _averaged(self._throughput, throughput, self._table.ema_decay)
        self._mean_tokens = _averaged(self._mean_tokens, length, LENGTH_DECAY)
        self._window.add(Sample(p=self._p, throughput=throughput, mean_tokens=length))

    def _decide(self) -> None:
        if self._fit is None:
            return
        target = self._table.throttle_margin * self._fit.p_star
        allowed = self._batch_of(target)
        p = self._batch_size * self._group_size
        if p > target and allowed < self._batch_size:
            self._batch_size, self._action = allowed, THROTTLE
        elif p < self._table.increase_margin * target and allowed > self._batch_size:
            self._batch_size, self._action = allowed, INCREASE

    def _batch_of(self, target: float) -> int:
        """The largest batch size whose completions do not exceed the target, within bounds and ceiling."""
        wanted = self._ceiling if target == UNBOUNDED else int(target / self._group_size)
        return min(max(wanted, self._table.min_batch_size), self._ceiling)

    def _lower_ceiling(self, failed: int) -> None:
        """Half of the size that did not fit, or the largest that did fit if that is more; always below the former."""
        fitting = self._largest_worked if self._largest_worked < failed else 0
        self._largest_worked = fitting
        self._ceiling = max(self._table.min_batch_size, min(self._ceiling, max(failed // 2, fitting)))
        self._batch_size = min(self._batch_size, self._ceiling)
        self._action = THROTTLE
        LOG.warning(
            "Out of memory with %d prompts x %d completions: back pressure stays at %d prompts or fewer from now on.",
            failed,
            self._group_size,
            self._ceiling,
        )

    def _regime(self, is_warmup: bool) -> str:
        if is_warmup:
            return WARMUP
        if self._fit is None:
            return UNKNOWN
        p_star = self._fit.p_star
        low = self._table.increase_margin * self._table.throttle_margin * p_star
        reachable = min(low, self._ceiling * self._group_size)
        return regime(self._p, p_star, underused_below=reachable, roofline=self._roofline)


def _sweep(smallest: int, largest: int) -> list[int]:
    """1, 2, 4, ... between the bounds, including both bounds."""
    powers = [2**exponent for exponent in range(largest.bit_length())]
    return sorted({smallest, *(power for power in powers if smallest <= power <= largest), largest})


def _averaged(before: float, new: float, decay: float) -> float:
    return new if before == 0.0 else decay * before + (1.0 - decay) * new
