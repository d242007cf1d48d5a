"""`[backend.options]` of the local backend."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class LocalOptions(BaseModel):
    """Options of the local backend. No row is ever truncated, and no option changes the gradient beyond rounding."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    micro_batch_tokens: int = Field(
        default=0,
        ge=0,
        description="Tokens of one forward and backward pass, a prompt shared by a group counted once; 0 = 1536 on a "
        "CPU, up to 65536 on a GPU, as many as fit into free memory.",
    )
    gradient_checkpointing: Literal["auto", "on", "off"] = Field(
        default="auto",
        description="Store one activation per layer and recompute the others in the backward pass; auto = where "
        "fewer than 8192 tokens would fit otherwise, or after running out of memory.",
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of the operations between matrix products, for the Llama family; slower to start.",
    )
    cache_gb: float = Field(
        default=0.0,
        ge=0.0,
        description="GiB for keys and values while sampling; completions that do not fit wait. 0 = 4 on a CPU, half of "
        "which is a working copy, and 80 % of the free memory on a GPU.",
    )
