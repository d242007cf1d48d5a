"""Out of memory while sampling: what was being computed, and the error when nothing smaller is left to try."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from retrain.api import OutOfMemoryError, Problem
from retrain_local.decoder import Shape


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
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


def too_big_to_sample(load: Load, shape: Shape, dtype: torch.dtype, device: torch.device) -> OutOfMemoryError:
    """The error when what was being computed does not fit, and a pool half as large would hold no row of it."""
    size = [2, shape.layers, load.rows, shape.kv_heads, load.width, shape.head_size]
    mebibytes = math.prod(size) * dtype.itemsize / 2**20
    what = f"sampling ran out of memory on {device} with {load}; "
    what += f"the biggest tensors: keys and values {size}, {mebibytes:.1f} MiB"
    fix = f"lower [training] max_tokens to {max(1, load.drawn // 2)}, or use a smaller [model] model"
    return OutOfMemoryError(Problem(where="sampling", what=what, fix=fix))


def pool_too_small(tokens: int, load: Load, device: torch.device) -> OutOfMemoryError:
    """The error when a pool of so many tokens does not hold the one row that is left."""
    what = (
        f"sampling ran out of memory on {device}: keys and values have room for {tokens} tokens, and {load} is too long"
    )
    fix = f"raise [backend.options] cache_gb, lower [training] max_tokens to {max(1, load.drawn // 2)}, "
    return OutOfMemoryError(Problem(where="sampling", what=what, fix=fix + "or use a device with more memory"))
