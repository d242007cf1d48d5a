"""Out of memory while sampling: the batch being computed, and the errors when nothing smaller can be tried."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from retrain.api import OutOfMemoryError, Problem
from retrain_local.decoder import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSize:
    """`rows` of at most `width` tokens each, of which the one with most had `drawn` tokens sampled."""

    rows: int
    width: int
    drawn: int

    @property
    def tokens(self) -> int:
        """Tokens if all were as long as the longest."""
        return self.rows * self.width

    def __str__(self) -> str:
        if not self.rows:
            return "keys and values alone"
        return f"one row of {self.width} tokens" if self.rows == 1 else f"{self.rows} rows of {self.width} tokens"


def too_big_to_sample(batch: BatchSize, shape: Shape, dtype: torch.dtype, device: torch.device) -> OutOfMemoryError:
    """The error when the batch does not fit and a pool half as large could not hold one of its rows."""
    size = [2, shape.layers, batch.rows, shape.kv_heads, batch.width, shape.head_size]
    mebibytes = math.prod(size) * dtype.itemsize / 2**20
    what = f"sampling ran out of memory on {device} with {batch}; "
    what += f"the biggest tensors: keys and values {size}, {mebibytes:.1f} MiB"
    fix = f"lower [training] max_tokens to {max(1, batch.drawn // 2)}, or use a smaller [model] model"
    return OutOfMemoryError(Problem(where="sampling", what=what, fix=fix))


def pool_too_small(tokens: int, batch: BatchSize, device: torch.device) -> OutOfMemoryError:
    """The error when a pool of `tokens` tokens cannot hold the one remaining row."""
    what = f"sampling ran out of memory on {device}: "
    what += f"keys and values have room for {tokens} tokens, and {batch} is too long"
    fix = f"raise [backend.options] cache_gb, lower [training] max_tokens to {max(1, batch.drawn // 2)}, "
    return OutOfMemoryError(Problem(where="sampling", what=what, fix=fix + "or use a device with more memory"))
