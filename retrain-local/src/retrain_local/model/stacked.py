"""Projections whose adapter is added by whatever reads their product, for decoding on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.nn import functional

from retrain_local.model.adapter import Adapter
from retrain_local.model.projection import Sampled, scaled
from retrain_local.model.weights import Linear


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LowRankSum:
    """Y + T_p (scale B_p)^T for every part p of a product, before it is added up.

    `y_NO` are the frozen matrices' products, `inner_NR` the columns T_p = x A_p^T side by side, `b_OR` scale B of the
    parts one below the other, [sum of outputs, rank]; `sizes` are the outputs of the parts.
    """

    y_NO: Tensor
    inner_NR: Tensor
    b_OR: Tensor
    sizes: tuple[int, ...]

    def total(self) -> Tensor:
        """The sum, written over `y_NO`; one product per part."""
        parts = zip(
            self.y_NO.split(self.sizes, dim=1),
            self.inner_NR.split(self.b_OR.shape[1], dim=1),
            self.b_OR.split(self.sizes),
            strict=True,
        )
        for part, inner, b in parts:
            part.addmm_(inner, b.T)
        return self.y_NO


@runtime_checkable
class SampledInParts(Sampled, Protocol):
    """A projection that can leave the addition to its reader."""

    rank: int

    def parts(self, x_NI: Tensor) -> LowRankSum:
        """Both addends."""


class SampledStacked:
    """x [W; A]^T in one product, W being shared with the trainer and A in the rows below it; then (x A^T) (scale B)^T.

    In decoding a product of few rows costs what its matrix takes to read, or a launch. A alone costs a launch for 1 %
    of the bytes of W: 4 of 21 launches of a layer. B is added by the kernel that reads the product, where one does.
    """

    def __init__(self, linear: Linear, stacked_OI: Tensor, rank: int) -> None:
        self._stacked, self._sizes, outputs = stacked_OI, linear.sizes, len(linear.weight)
        self.rank = rank
        stacked_OI[outputs:].zero_()
        self._a = stacked_OI[outputs : outputs + len(linear.sizes) * rank]
        self._b = linear.weight.new_zeros(outputs, rank)
        self._bias = None
        if linear.bias is not None:
            self._bias = torch.cat([linear.bias, linear.bias.new_zeros(len(stacked_OI) - outputs)])

    def parts(self, x_NI: Tensor) -> LowRankSum:
        outputs = len(self._b)
        product = functional.linear(x_NI, self._stacked, self._bias)
        inner_NR = product[:, outputs : outputs + len(self._a)]
        return LowRankSum(y_NO=product[:, :outputs], inner_NR=inner_NR, b_OR=self._b, sizes=self._sizes)

    def __call__(self, x_NI: Tensor) -> Tensor:
        return self.parts(x_NI).total()

    def take(self, adapter: Adapter) -> None:
        self._a.copy_(adapter.a)
        self._b.copy_(scaled(adapter.b, adapter, self._b.dtype))
