"""Rows of numbers to 8 bits in one kernel, where PyTorch takes eight."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from retrain_local.attention.paged_triton import on_device_of

TILE = 4096  # numbers of a row at a time; a wider row is read a second time, out of the cache


def rounded(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """See `retrain_local.model.quantised.rounded`."""
    rows, size = x_NI.shape
    stored_NI = torch.empty(rows, size, dtype=torch.float8_e4m3fn, device=x_NI.device)
    scales_N1 = torch.empty(rows, 1, dtype=torch.float32, device=x_NI.device)
    x_NI = x_NI if x_NI.stride(-1) == 1 else x_NI.contiguous()
    with on_device_of(x_NI):
        _round[(rows,)](
            x_NI,
            stored_NI,
            scales_N1,
            x_NI.stride(0),
            SIZE=size,
            TILE=min(TILE, triton.next_power_of_2(size)),
            num_warps=4,
        )
    return stored_NI, scales_N1


@triton.jit  # type: ignore[untyped-decorator]
def _round(x, stored, scales, x_row, SIZE: tl.constexpr, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0).to(tl.int64)
    largest, unseen = 0.0, 0.0  # the largest of numbers need not see a NaN, and so `unseen` has to
    for first in range(0, SIZE, TILE):
        at = first + tl.arange(0, TILE)
        wide = tl.load(x + row * x_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.max(tl.abs(wide), 0))
        unseen += tl.sum(wide * 0.0, 0)
    scale = tl.maximum(tl.div_rn(largest, 448.0), 1.1754943508222875e-38)
    for first in range(0, SIZE, TILE):
        at = first + tl.arange(0, TILE)
        wide = tl.load(x + row * x_row + at, mask=at < SIZE, other=0.0).to(tl.float32)
        cells = tl.minimum(tl.maximum(tl.div_rn(wide, scale), -448.0), 448.0)
        tl.store(stored + row * SIZE + at, cells.to(stored.dtype.element_ty), mask=at < SIZE)
    tl.store(scales + row, scale + unseen)
