"""What stands between the products of a layer when one token per row is decoded, adapter and cache included.

Launches per layer and token: a norm with the residual's addition, two products with the adapter's share, heads with
their positions and the cache, attention (one more where keys are cut into stretches), the norm again, gates, and three
more products: with `SampledStacked` 11 or 12, where separate operations and products take 20 or 21.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from retrain_local.decoder import Target
from retrain_local.model import operations
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


def plain_kernels() -> DecodeKernels:
    """The definitions, in PyTorch."""
    return DecodeKernels(add_norm=_add_norm, heads=_heads, swiglu=_swiglu)


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


def scratch_target(rows: int, kv_heads: int, size: int, like: Tensor) -> Target:
    """Cells for one step, row by row."""
    keys, values = like.new_empty(rows, kv_heads, size), like.new_empty(rows, kv_heads, size)
    return Target(keys_SKD=keys, values_SKD=values, slots_B=torch.arange(rows, device=like.device))
