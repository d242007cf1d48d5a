"""`[squeeze]`: rank analysis of a trained adapter; in a training file it does not affect training."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from retrain.kernel.config.keys import Table, key

DEVICE = r"^(cpu|mps|(gpu|cuda)(:\d+)?)$"


class SqueezeTable(Table):
    min_variance_retention: float = key(0.95, "Variance to keep, averaged over modules.", gt=0.0, le=1.0)
    adapter_path: str = key("", "Adapter folder or run to analyse; a campaign fills it in.", is_path=True)
    source_rank: int = key(0, "Rank that the adapter must have; 0 = any.", ge=0)
    target_ranks: list[Annotated[int, Field(ge=1)]] = key([], "Ranks to try; empty = powers of two and its own.")
    output_path: str = key("", "Folder of the compressed adapter; empty = none.", is_path=True)
    compress_to: int = key(0, "Rank to compress to; 0 = the recommended one.", ge=0, needs="squeeze.output_path")
    device: str = key("cpu", "Device of the decomposition: cpu, gpu:0, mps.", pattern=DEVICE)
