"""`[squeeze]`: rank analysis of a trained adapter; in a training file it changes nothing about the training."""

from __future__ import annotations

from retrain.config.keys import Table, key

PENDING = "rank analysis is not built yet"


class SqueezeTable(Table):
    """Rank analysis of a trained adapter."""

    min_variance_retention: float = key(0.95, "Variance to keep.", gt=0.0, le=1.0, pending=PENDING)
    adapter_path: str = key("", "Adapter folder to analyse.", pending=PENDING)
    source_rank: int = key(0, "Rank of that adapter; 0 = read it.", ge=0, pending=PENDING)
    target_ranks: list[int] = key([], "Ranks to try; empty = powers of two.", pending=PENDING)
    output_path: str = key("", "Folder of the compressed adapter; empty = none.", pending=PENDING)
    compress_to: int = key(0, "Rank to compress to; 0 = the recommended one.", ge=0, pending=PENDING)
    device: str = key("cpu", "Device of the decomposition.", pending=PENDING)
