"""`[backend.options]` of the local backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LocalOptions(BaseModel):
    """Options of the local backend. A row is never cut; the gradient depends on none of them, up to rounding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    micro_batch_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens that one forward and backward pass holds in memory, a prompt that its group shares counted "
        "once; 0 = 1536 on a CPU, at most 65536 on a GPU, fewer where the free memory ends.",
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Keep one activation per layer and compute the others again in the backward pass; auto = where "
        "fewer than 8192 tokens would fit otherwise, or memory has run out.",
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of what stands between a layer's products, for the Llama family: slower to start.",
    )
    cache_gb: float = Field(
        default=0.0,
        ge=0.0,
        description="GiB for keys and values while sampling; completions that do not fit wait. 0 = 4 on a CPU, half of "
        "it a copy that is read, and 80 % of the free memory on a GPU.",
    )
