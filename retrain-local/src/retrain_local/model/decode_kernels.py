"""What stands between the products of a layer when one token per row is decoded, adapter and cache included.

Launches per layer and token: a norm with the residual's addition, two products with the adapter's share, heads with
their positions and the cache, attention (one more where keys are cut into stretches), the norm again, gates, and three
more products: with `SampledStacked` 11 or 12, where separate operations and products take 20 or 21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from retrain_local.decoder import Shape, Target
from retrain_local.model import operations
from retrain_local.model.fused import EPS, difference, numbers, proven
from retrain_local.model.operations import Turn
from retrain_local.model.stacked import LowRankSum


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeKernels:
    """`add_norm` adds its second argument to x in place, if there is one, and returns the norm of the sum.

    `heads` completes a product, splits it as `operations.split_heads` does, stores keys and values, and returns the
    queries. `swiglu` completes a product before it gates it.
    """

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    heads: Callable[[LowRankSum, Turn, Target], Tensor]
    swiglu: Callable[[LowRankSum], Tensor]


def _add_norm(x_ND: Tensor, added_ND: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    if added_ND is not None:
        x_ND += added_ND
    return operations.rms_norm(x_ND, weight_D, eps)


def _heads(product: LowRankSum, turn: Turn, target: Target) -> Tensor:
    size = 2 * turn.cos_N1P.shape[-1]
    queries_NHD, *new = operations.split_heads(product.total().view(len(product.y_NO), -1, size), turn)
    for cells, states in zip((target.keys_SKD, target.values_SKD), new, strict=True):
        cells.index_copy_(0, target.slots_B, states.to(cells.dtype))
    return queries_NHD


def _swiglu(product: LowRankSum) -> Tensor:
    return operations.swiglu(product.total())


PLAIN = DecodeKernels(add_norm=_add_norm, heads=_heads, swiglu=_swiglu)  # the definitions


def scratch_target(rows: int, kv_heads: int, size: int, like: Tensor) -> Target:
    """Cells for one step, row by row."""
    keys, values = like.new_empty(rows, kv_heads, size), like.new_empty(rows, kv_heads, size)
    return Target(keys_SKD=keys, values_SKD=values, slots_B=torch.arange(rows, device=like.device))


ROWS = 3, 33  # fewer than a tile has, and more


def fused_decode(device: torch.device, dtype: torch.dtype, shape: Shape, rank: int) -> DecodeKernels | None:
    """Kernels for layers that decode one token per row, or None where there are none or they prove wrong."""
    place, given = "retrain_local.model.decode_triton:KERNELS", (device, dtype, shape, rank)
    found: DecodeKernels | None = proven("decoding kernels", device, place, lambda made: decode_faults(made, *given))
    return found


def decode_faults(
    made: DecodeKernels, device: torch.device, dtype: torch.dtype, shape: Shape, rank: int
) -> Iterator[str]:
    """Where these differ from `plain_kernels`."""
    plain, kv_heads, size, rows = PLAIN, shape.kv_heads, shape.head_size, max(ROWS)
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
