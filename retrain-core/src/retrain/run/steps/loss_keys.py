"""The keys of `[algorithm]` about the loss, beside `loss` and its clips: how terms are averaged and weighted."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import field_validator

from retrain.kernel.config.keys import Table, key


class LossKeys(Table):
    """Extends `[algorithm]`."""

    dual_clip: float = key(
        0.0, "ppo: where the advantage is negative, it counts at most this many times; 0 = off, else > 1."
    )
    aggregation: Literal["", "token_mean", "sequence_mean", "constant"] = key(
        "", "Over what the loss is averaged; empty = the loss's own: token_mean, for gspo sequence_mean."
    )
    loss_params: dict[str, Any] = key({}, "Parameters of the loss.")
    is_level: Literal["token", "sequence", "geometric"] = key(
        "token", "What is_bounds apply to: each weight, their product over a sequence, or its T-th root."
    )
    is_mode: Literal["truncate", "mask"] = key(
        "truncate", "A trainer/sampler importance weight outside is_bounds: moved to the bound, or 0."
    )
    is_bounds: list[float] = key([], "[low, high] of the trainer/sampler importance weight; empty = off.")

    @field_validator("dual_clip")
    @classmethod
    def _above_one(cls, value: float) -> float:
        if value != 0.0 and value <= 1.0:
            raise ValueError("must be above 1, usually 3; 0 = off")
        return value

    @field_validator("is_bounds")
    @classmethod
    def _a_range(cls, bounds: list[float]) -> list[float]:
        if bounds and not (len(bounds) == 2 and 0.0 <= bounds[0] < bounds[1]):
            raise ValueError("must be [low, high] with 0 <= low < high, for example [0.5, 2.0]")
        return bounds
