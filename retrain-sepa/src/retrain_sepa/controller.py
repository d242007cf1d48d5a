"""The SEPA schedule: how strongly execution tokens are pooled at each step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from retrain.api import Controller, ControllerView, PluginContext, Problem, ResumeError
from retrain_sepa.tables import SepaTable

# A lower bound, because the starting variance is a divisor.
VARIANCE_EPS = 1e-8
SAVED_SETTINGS = {  # key of [sepa] -> its name in a checkpoint
    "steps": "sepa_steps",
    "schedule": "sepa_schedule",
    "delay_steps": "sepa_delay_steps",
    "correct_rate_gate": "sepa_correct_rate_gate",
    "ema_decay": "sepa_ema_decay",
    "threshold": "sepa_var_threshold",
    "warmup_steps": "sepa_warmup",
}


def sepa_controller(context: PluginContext) -> Controller:
    return SepaController(context.config.table("sepa", SepaTable), place=context.config.place)


@dataclass(slots=True)
class SepaController:
    """lambda per step, in [0, 1]; `value(step)` comes before `observe` of that step.

    linear: clip((step - delay_steps) / steps, 0, 1), always 0 when steps = 0.
    auto: the larger of linear and 1 - min((v / v_0) / threshold, 1), where v is the moving average (`ema_decay`) of
    the step's variance over execution tokens and v_0 = max(v, 1e-8) after `warmup_steps` steps that had one.
    gate: lambda is 0 until a step's correct rate reaches `correct_rate_gate`; from the next step on the gate stays
    open. The ramp counts absolute steps meanwhile, so lambda jumps when the gate opens late.
    Differs from the reference implementation: that one updates v once per completion.
    """

    settings: SepaTable
    place: Callable[[str], str] = str  # of a key, for messages
    var_ema: float | None = None
    var_0: float | None = None
    warmup_seen: int = 0
    gate_open: bool = False

    def __post_init__(self) -> None:
        self.gate_open = self.gate_open or self.settings.correct_rate_gate <= 0.0

    def value(self, step: int) -> float:
        if not self.gate_open:
            return 0.0
        settings = self.settings
        linear = min(max((step - settings.delay_steps) / settings.steps, 0.0), 1.0) if settings.steps else 0.0
        if settings.schedule != "auto" or self.var_ema is None or self.var_0 is None:
            return linear
        return max(linear, 1.0 - min(self.var_ema / self.var_0 / settings.threshold, 1.0))

    def observe(self, view: ControllerView) -> None:
        """Learn from a finished step; a rate or variance that is missing or not a finite number >= 0 is ignored."""
        rate, variance = view.correct_rate, view.execution_variance
        if rate is not None and math.isfinite(rate) and rate >= self.settings.correct_rate_gate:
            self.gate_open = True
        if variance is None or not math.isfinite(variance) or variance < 0.0:
            return
        decay = self.settings.ema_decay
        self.var_ema = variance if self.var_ema is None else decay * self.var_ema + (1.0 - decay) * variance
        self.warmup_seen += 1
        if self.var_0 is None and self.warmup_seen >= self.settings.warmup_steps:
            self.var_0 = max(self.var_ema, VARIANCE_EPS)

    def metrics(self) -> Mapping[str, float | bool]:
        return {"sepa_gate_open": self.gate_open}

    def state(self) -> Mapping[str, Any]:
        """Return the moving average, the gate, and the settings that they depend on."""
        return {
            **{saved: getattr(self.settings, name) for name, saved in SAVED_SETTINGS.items()},
            "eps": VARIANCE_EPS,
            "var_ema": self.var_ema,
            "var_0": self.var_0,
            "warmup_seen": self.warmup_seen,
            "gate_open": self.gate_open,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from `state`; ResumeError, with nothing changed, when settings differ or the state is damaged."""
        problems = [*self._damage(state), *self._mismatches(state)]
        if problems:
            raise ResumeError(*problems)
        self.var_ema, self.var_0 = state["var_ema"], state["var_0"]
        self.warmup_seen, self.gate_open = state["warmup_seen"], state["gate_open"]

    def _mismatches(self, state: Mapping[str, Any]) -> list[Problem]:
        return [
            Problem(
                code="resume.sepa-differs",
                where=self.place(f"sepa.{name}"),
                what=f"is {getattr(self.settings, name)!r}, but the checkpoint was made with {state[saved]!r}",
                why="the schedule would differ from the interrupted run's",
                fix=f"set it to {state[saved]!r}, or start a new run",
            )
            for name, saved in SAVED_SETTINGS.items()
            if saved in state and state[saved] != getattr(self.settings, name)
        ]

    def _damage(self, state: Mapping[str, Any]) -> list[Problem]:
        seen = state.get("warmup_seen")
        sound = {
            "var_ema": _is_variance(state.get("var_ema", math.nan)),
            "var_0": _is_variance(state.get("var_0", math.nan)),
            "warmup_seen": isinstance(seen, int) and not isinstance(seen, bool) and seen >= 0,
            "gate_open": isinstance(state.get("gate_open"), bool),
            **{saved: saved in state for saved in SAVED_SETTINGS.values()},
        }
        return [
            Problem(
                code="resume.sepa-damaged",
                where=f"checkpoint, sepa.{name}",
                what=f"is {state.get(name, 'missing')!r}",
                fix="resume from another checkpoint",
            )
            for name, fine in sound.items()
            if not fine
        ]


def _is_variance(value: object) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0.0
