"""The course of the learning rate over a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from retrain.kernel.config.resolved import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """`[optimizer] schedule`, `warmup_steps` and `min_lr_ratio`, with the `lr` and `max_steps` of `[training]`."""

    lr: float
    max_steps: int
    schedule: str = "constant"
    warmup_steps: int = 0
    min_lr_ratio: float = 0.0

    @classmethod
    def of(cls, config: Config) -> Course:
        """The course of a configuration."""
        return cls(
            lr=config.training.lr,
            max_steps=config.training.max_steps,
            schedule=config.optimizer.schedule,
            warmup_steps=config.optimizer.warmup_steps,
            min_lr_ratio=config.optimizer.min_lr_ratio,
        )

    @property
    def falls(self) -> bool:
        """Whether the rate depends on the number of steps of the run."""
        return self.schedule != "constant"

    @property
    def is_constant(self) -> bool:
        """Whether every step has the same rate."""
        return not self.falls and not self.warmup_steps

    @property
    def warning(self) -> str:
        """A warning that the rate never reaches `lr`; empty if it does."""
        if self.warmup_steps <= self.max_steps:
            return ""
        return f"warmup_steps = {self.warmup_steps}, max_steps = {self.max_steps}: the learning rate never reaches lr"

    def rate(self, step: int) -> float:
        """The rate of a step, lr (f (1 - min_lr_ratio) + min_lr_ratio).

        With N = `max_steps` and W = `warmup_steps`, f = (step + 1) / W in the first W steps. Then constant: 1; linear:
        (N - step) / (N - W); cosine: (1 + cos(pi (step - W) / (N - W))) / 2.
        """
        warmup = self.warmup_steps
        done = (step - warmup) / max(self.max_steps - warmup, 1)
        after = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2.0}
        factor = (step + 1) / warmup if step < warmup else after[self.schedule]
        return self.lr * (factor * (1.0 - self.min_lr_ratio) + self.min_lr_ratio)

    def __str__(self) -> str:
        """`cosine, from 0.003 down to 0.0003 within 70 steps, after 10 steps of warm-up`; `constant`."""
        parts = [self.schedule]
        if self.falls:
            parts.append(f"from {self.lr:g} down to {self.lr * self.min_lr_ratio:g} within {self.max_steps} steps")
        return ", ".join([*parts, f"after {self.warmup_steps} steps of warm-up"] if self.warmup_steps else parts)
