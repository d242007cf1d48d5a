"""`[backpressure]`: adaptive batch sizing from a fitted throughput curve."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from retrain.kernel.config.keys import Table, key
from retrain.kernel.declared import Kind


class BackpressureTable(Table):
    """Adaptive batch sizing (Universal Scalability Law and roofline)."""

    enabled: bool = key(False, "Let measured throughput set the batch size.")
    pacer: str = key(
        "usl", "What sets the batch size: usl or a plugin.", names=Kind.PACER, needs="backpressure.enabled"
    )
    warmup_steps: int = key(
        10, "Steps that sweep 1, 2, 4, ... prompts before the first decision.", ge=0, needs="backpressure.enabled"
    )
    ema_decay: float = key(
        0.9, "Decay of the throughput average (bp_throughput).", ge=0.0, le=1.0, needs="backpressure.enabled"
    )
    throttle_margin: float = key(
        0.85, "Target: this fraction of the p of highest throughput.", gt=0.0, le=1.0, needs="backpressure.enabled"
    )
    increase_margin: float = key(
        0.5, "Increase when below this fraction of the target.", gt=0.0, le=1.0, needs="backpressure.enabled"
    )
    min_batch_size: int = key(1, "Smallest batch size.", ge=1, needs="backpressure.enabled")
    max_batch_size: int = key(64, "Largest batch size.", ge=1, needs="backpressure.enabled")
    peak_gflops: float = key(0.0, "Peak GFLOP/s of the device; 0 = unknown.", ge=0.0, needs="backpressure.enabled")
    peak_bw_gb_s: float = key(0.0, "Peak memory bandwidth, GB/s; 0 = unknown.", ge=0.0, needs="backpressure.enabled")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_batch_size < self.min_batch_size:
            raise ValueError("max_batch_size is below min_batch_size")
        return self
