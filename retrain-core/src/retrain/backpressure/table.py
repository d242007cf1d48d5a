"""`[backpressure]`: adaptive batch sizing from a fitted throughput curve."""

from __future__ import annotations

from typing import Self

from pydantic import model_validator

from retrain.config.keys import Table, key

PENDING = "adaptive batch sizing is not built yet"


class BackpressureTable(Table):
    """Adaptive batch sizing (Universal Scalability Law and roofline)."""

    enabled: bool = key(False, "Adapt the batch size.", pending=PENDING)
    warmup_steps: int = key(10, "Steps before the first fit.", ge=0, pending=PENDING)
    ema_decay: float = key(0.9, "Decay of the throughput average.", ge=0.0, le=1.0, pending=PENDING)
    throttle_margin: float = key(0.85, "Target fraction of the optimum.", gt=0.0, le=1.0, pending=PENDING)
    increase_margin: float = key(0.5, "Increase below this fraction of the target.", gt=0.0, le=1.0, pending=PENDING)
    min_batch_size: int = key(1, "Smallest batch.", ge=1, pending=PENDING)
    max_batch_size: int = key(64, "Largest batch.", ge=1, pending=PENDING)
    peak_gflops: float = key(0.0, "Peak GFLOP/s of the device; 0 = unknown.", ge=0.0, pending=PENDING)
    peak_bw_gb_s: float = key(0.0, "Peak memory bandwidth, GB/s; 0 = unknown.", ge=0.0, pending=PENDING)

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.max_batch_size < self.min_batch_size:
            raise ValueError("max_batch_size is below min_batch_size")
        return self
