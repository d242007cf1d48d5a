"""`[backend.options]` of the local backend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LocalOptions(BaseModel):
    """`micro_batch_tokens` bounds the tokens, padding included, that one forward and backward pass holds in memory.

    0 = 2048 on a CPU, 16384 on a GPU. A row is never cut. The gradient does not depend on it, up to rounding.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    micro_batch_tokens: int = Field(0, ge=0)
