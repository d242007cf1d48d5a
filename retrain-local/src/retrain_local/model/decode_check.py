"""Selects the kernels of decoding, by a check against their definitions on the device they will run on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from retrain_local.decoder import Shape, Target
from retrain_local.model.decode_kernels import DecodeKernels, plain_kernels
from retrain_local.model.fused import EPS, difference, numbers, proven
from retrain_local.model.operations import Turn
from retrain_local.model.stacked import LowRankSum

ROWS = 3, 33  # fewer than a tile has, and more


def fused_decode(device: torch.device, dtype: torch.dtype, shape: Shape, rank: int) -> DecodeKernels | None:
    """Kernels for layers that decode one token per row, or None where there are none or they prove wrong."""

    def make() -> DecodeKernels:
        from retrain_local.model.decode_triton import triton_kernels

        return triton_kernels()

    return proven("decoding kernels", device, make, lambda made: decode_faults(made, device, dtype, shape, rank))


def decode_faults(
    made: DecodeKernels, device: torch.device, dtype: torch.dtype, shape: Shape, rank: int
) -> Iterator[str]:
    """Where these differ from `plain_kernels`."""
    plain, kv_heads, size, rows = plain_kernels(), shape.kv_heads, shape.head_size, max(ROWS)
    with torch.no_grad():
        weight_D = numbers((shape.hidden,), dtype, device)
        for number_of_rows in ROWS:
            x_ND, added_ND = (numbers((number_of_rows, shape.hidden), dtype, device) for _ in range(2))
            for added in (None, added_ND):
                sums = x_ND.clone(), x_ND.clone()
                norms = (each.add_norm(x, added, weight_D, EPS) for each, x in zip((made, plain), sums, strict=True))
                yield from difference("decoding's norm", *norms)
                yield from difference("decoding's sum", *sums)
            got, wanted = (
                each.swiglu(_product(number_of_rows, (shape.inner,) * 2, rank, x_ND)) for each in (made, plain)
            )
            yield from difference("decoding's gate", got, wanted)
        sizes = shape.heads * size, kv_heads * size, kv_heads * size
        angles = numbers((rows, 1, size // 2), torch.float32, device) * 3.0
        for norm in (None, numbers((shape.heads + kv_heads, size), dtype, device)):
            turn = Turn(
                heads=shape.heads,
                kv_heads=kv_heads,
                cos_N1P=angles.cos().to(dtype),
                sin_N1P=angles.sin().to(dtype),
                norm_HD=norm,
                eps=EPS,
            )
            found = []
            for each in (made, plain):
                cells = [torch.zeros(rows + 2, kv_heads, size, dtype=dtype, device=device) for _ in range(2)]
                slots_B = torch.arange(rows, 0, -1, device=device)
                target = Target(keys_SKD=cells[0], values_SKD=cells[1], slots_B=slots_B)
                found.append((each.heads(_product(rows, sizes, rank, weight_D), turn, target), *cells))
            for name, one, other in zip(("queries", "keys", "values"), *found, strict=True):
                yield from difference(f"decoding's {name}", one, other)


def _product(rows: int, sizes: tuple[int, ...], rank: int, like: Tensor) -> LowRankSum:
    outputs, columns = sum(sizes), len(sizes) * rank
    product = numbers((rows, outputs + columns + 8), like.dtype, like.device)
    return LowRankSum(
        y_NO=product[:, :outputs],
        inner_NR=product[:, outputs : outputs + columns],
        b_OR=numbers((outputs, rank), like.dtype, like.device) * rank**-0.5,
        sizes=sizes,
    )
