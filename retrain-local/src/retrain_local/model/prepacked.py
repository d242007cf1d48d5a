"""Matrices kept in the layout that oneDNN multiplies by, where that is faster than PyTorch's own product."""

from __future__ import annotations

import platform
from functools import cache
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from retrain_local.memory.sizes import PREPACK_FROM

LAYOUT_ROWS = 32  # rows of x that the layout is chosen for; on the CPUs measured it is the best one for any number
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the largest element of a product


class Matrix(Protocol):
    """A matrix W [outputs, inputs] that rows are multiplied by; no gradient flows through it."""

    def linear(self, x_NI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        """x W^T + bias, [N, outputs] in x's dtype."""

    def take(self, weight_OI: Tensor) -> None:
        """Hold these numbers from now on."""


class Plain:
    """The tensor itself, which is shared with the caller; it is rounded to the dtype of the rows."""

    def __init__(self, weight_OI: Tensor) -> None:
        self._weight_OI = weight_OI

    def linear(self, x_NI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        return functional.linear(x_NI, self._weight_OI.detach().to(x_NI.dtype), bias_O)

    def take(self, weight_OI: Tensor) -> None:
        """See `Matrix`; copied in place, so that CUDA graphs see it."""
        self._weight_OI.copy_(weight_OI)


class Prepacked:
    """A copy in oneDNN's blocked layout, as many bytes as the matrix.

    The product of a plain matrix copies it to such a layout every time, which a few rows do not pay back: with 8 to 32
    rows this one takes half the time.
    """

    def __init__(self, weight_OI: Tensor) -> None:
        self.take(weight_OI)

    def linear(self, x_NI: Tensor, bias_O: Tensor | None = None) -> Tensor:
        y_NO: Tensor = torch.ops.mkldnn._linear_pointwise(x_NI, self._packed, bias_O, "none", [], "")
        return y_NO

    def take(self, weight_OI: Tensor) -> None:
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight_OI.detach(), LAYOUT_ROWS)


def is_prepacked(weight_OI: Tensor) -> bool:
    """Whether a matrix is worth a copy in oneDNN's layout: large enough for the call to be cheap beside the product."""
    is_here = weight_OI.device.type == "cpu" and weight_OI.numel() >= PREPACK_FROM
    return is_here and can_prepack(weight_OI.dtype)


def frozen_matrix(weight_OI: Tensor, *, may_copy: bool = True) -> Matrix:
    """A matrix that never changes; it shares the tensor unless `may_copy` and a prepacked copy is worth it."""
    return Prepacked(weight_OI) if may_copy and is_prepacked(weight_OI) else Plain(weight_OI)


def own_matrix(weight_OI: Tensor) -> Matrix:
    """A matrix whose numbers can be replaced without changing the tensor."""
    return Prepacked(weight_OI) if is_prepacked(weight_OI) else Plain(weight_OI.clone())


@cache
def can_prepack(dtype: torch.dtype) -> bool:
    """Whether oneDNN's product of a prepacked matrix works here: measured to be faster on x86 only."""
    if dtype not in TOLERANCE or platform.machine().lower() not in ("x86_64", "amd64"):
        return False
    weight_OI = torch.arange(48 * 32, dtype=torch.float32).mul_(1.7).sin_().view(48, 32).to(dtype)
    x_NI = torch.arange(3 * 32, dtype=torch.float32).cos_().view(3, 32).to(dtype)
    bias_O = weight_OI[:, 0].contiguous()
    wanted_NO = functional.linear(x_NI.float(), weight_OI.float(), bias_O.float())
    try:
        with torch.no_grad():
            found_NO = Prepacked(weight_OI).linear(x_NI, bias_O).float()
    except (AttributeError, NotImplementedError, RuntimeError):  # PyTorch without oneDNN, or a CPU it does not support
        return False
    return bool((found_NO - wanted_NO).abs().max() <= TOLERANCE[dtype] * wanted_NO.abs().max())
