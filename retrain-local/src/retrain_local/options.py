"""`[backend.options]` of the local backend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LocalOptions(BaseModel):
    """Options of the local backend. A row is never cut; the gradient depends on none of them, up to rounding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    micro_batch_tokens: int = Field(
        0,
        ge=0,
        description="Tokens, padding included, that one forward and backward pass holds in memory; "
        "0 = 2048 on a CPU, 16384 on a GPU.",
    )
