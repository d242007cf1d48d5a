"""`[backend.options]` of the local backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LocalOptions(BaseModel):
    """Options of the local backend. A row is never cut; the gradient depends on none of them, up to rounding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    micro_batch_tokens: int = Field(
        0,
        ge=0,
        description="Tokens that one forward and backward pass holds in memory, a prompt that its group shares counted "
        "once; 0 = 2048 on a CPU, as many as the free memory takes on a GPU.",
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        "auto",
        description="Keep one activation per layer and compute the others again in the backward pass; auto = where one "
        "row of the longest length would not fit otherwise.",
    )
    compile: bool = Field(
        False, description="torch.compile of the trained layers: a minute at the start for faster steps on a GPU."
    )
    cache_gb: float = Field(
        0.0,
        ge=0.0,
        description="GiB of keys and values kept while sampling, or that much less if memory runs out; completions "
        "beyond that wait. 0 = 4 on a CPU, a share of the free memory on a GPU.",
    )
