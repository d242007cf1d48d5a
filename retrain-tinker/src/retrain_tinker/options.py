"""`[backend.options]` of the tinker backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class TinkerOptions(BaseModel):
    """Where the service differs from what it is taken for, and how long it may take."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    base_model: str = Field(
        default="",
        description="The model's name on the service, where that is not [model] model: a server of one's own knows a "
        "model by the folder that it was started with.",
    )
    reduction: Literal["auto", "token_sum", "sequence_mean"] = Field(
        default="auto",
        description="How the service adds up the losses of tokens: token_sum (the hosted service), sequence_mean "
        "(SkyRL-tx: the mean over each row, then over rows); auto goes by what the service answers.",
    )
    connect_timeout_s: float = Field(
        default=120.0, gt=0.0, description="Seconds for each call until the training client stands."
    )
    timeout_s: float = Field(
        default=1800.0,
        gt=0.0,
        description="Seconds for every later call: all completions of a step, an optimizer step, a checkpoint.",
    )
    download_adapter: bool = Field(
        default=True,
        description="Put the PEFT adapter into each checkpoint; without it a checkpoint only says where on the service "
        "the adapter is.",
    )
