"""Matrices of 8-bit floats for sampling: `[inference] dtype = "fp8"`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from retrain_local.model.adapter import Adapter
from retrain_local.model.fused import difference, numbers, proven
from retrain_local.model.projection import scaled
from retrain_local.model.stacked import LowRankSum
from retrain_local.model.weights import Linear

FP8 = torch.float8_e4m3fn
LARGEST = 448.0  # of float8_e4m3fn
ALIGNMENT = 16  # both dimensions of a matrix must be a multiple of this
TINY = torch.finfo(torch.float32).tiny
Rounding = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Fp8Matrix:
    """A frozen matrix [outputs, inputs] as float8_e4m3fn with one fp32 scale per row, half the bytes of bf16."""

    weight_OI: Tensor
    scales_O: Tensor
    round_rows: Rounding

    @classmethod
    def of(cls, weight_OI: Tensor, round_rows: Rounding | None = None) -> Fp8Matrix:
        """Round to nearest; the largest element of a row becomes 448. `round_rows` rounds what is multiplied."""
        stored_OI, scales_O1 = rounded(weight_OI)
        return cls(weight_OI=stored_OI, scales_O=scales_O1[:, 0], round_rows=round_rows or rounded)

    def linear(self, x_NI: Tensor) -> Tensor:
        """x W^T in x's dtype; x is rounded to 8 bits too, with one scale per row. Non-finite inputs become NaN."""
        stored_NI, scales_N1 = self.round_rows(x_NI)
        y_NO: Tensor = torch._scaled_mm(
            stored_NI, self.weight_OI.T, scale_a=scales_N1, scale_b=self.scales_O[None, :], out_dtype=torch.bfloat16
        )
        return y_NO.to(x_NI.dtype)


class SampledFp8:
    """x W^T + (x A^T) (scale B)^T with W in 8 bits; the adapter stays in the dtype that it is sampled with.

    W is read in half the time: of a 4B model 3.6 GB less per token step, 1.2 ms at 3 TB/s. Rounding x costs one launch
    for each of 144 products, about 0.3 ms in all; in PyTorch it is eight, which would cost more than is saved.
    """

    def __init__(self, linear: Linear, rank: int) -> None:
        self._bias, self._sizes, self.rank = linear.bias, linear.sizes, rank
        weight = linear.weight
        self._matrix = Fp8Matrix.of(weight, rounding_for(weight.device, weight.dtype, weight.shape[1]))
        parts = len(linear.sizes)
        self._a = weight.new_zeros(parts * rank, weight.shape[1])
        self._b = weight.new_zeros(weight.shape[0], rank)

    def parts(self, x_NI: Tensor) -> LowRankSum:
        y_NO = self._matrix.linear(x_NI)
        if self._bias is not None:
            y_NO += self._bias
        return LowRankSum(y_NO=y_NO, inner_NR=x_NI @ self._a.T, b_OR=self._b, sizes=self._sizes)

    def __call__(self, x_NI: Tensor) -> Tensor:
        """[N, sum of outputs]."""
        return self.parts(x_NI).total()

    def take(self, adapter: Adapter) -> None:
        """Use these matrices from now on; copied in place, so that CUDA graphs see them."""
        self._a.copy_(adapter.a)
        self._b.copy_(scaled(adapter.b, adapter, self._b.dtype))


def fp8_refusal(device: torch.device) -> str | None:
    """Why 8-bit matrices cannot be multiplied on this device; None if they can."""
    if device.type != "cuda":
        return f"{device} has no matrix product of 8-bit floats"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) < (8, 9):
        return f"8-bit floats need compute capability 8.9, this GPU has {major}.{minor}"
    try:
        probe = Fp8Matrix.of(torch.ones(ALIGNMENT, ALIGNMENT, dtype=torch.bfloat16, device=device))
        probe.linear(torch.ones(1, ALIGNMENT, dtype=torch.bfloat16, device=device))
    except RuntimeError as error:
        return f"PyTorch {torch.__version__} does not multiply them here: {str(error).splitlines()[0]}"
    return None


def takes_fp8(linear: Linear) -> bool:
    """Whether the 8-bit product supports the sizes of a matrix; other matrices are not quantised."""
    return all(size % ALIGNMENT == 0 for size in linear.weight.shape)


@cache
def rounding_for(device: torch.device, dtype: torch.dtype, size: int) -> Rounding:
    """What rounds rows of this many numbers: one kernel where it proves right, else PyTorch."""
    place, given = "retrain_local.model.operations_triton:rounded", (device, dtype, size)
    return proven("kernels that round to 8 bits", device, place, lambda made: rounding_faults(made, *given)) or rounded


def rounding_faults(made: Rounding, device: torch.device, dtype: torch.dtype, size: int) -> Iterator[str]:
    """Where it differs from `rounded`, row of zeros included."""
    x_NI = numbers((3, size), dtype, device)
    x_NI[1] = 0.0
    (cells, scales), (wanted, wanted_scales) = made(x_NI), rounded(x_NI)
    yield from difference("scales", scales, wanted_scales)
    yield from difference("numbers of 8 bits", (cells.float() * scales).to(dtype), (wanted.float() * scales).to(dtype))


def rounded(x_NI: Tensor) -> tuple[Tensor, Tensor]:
    """x as 8-bit numbers [N, I] and scales [N, 1]."""
    wide_NI = x_NI.float()
    scales_N1 = wide_NI.abs().amax(dim=1, keepdim=True).div_(LARGEST).clamp_(min=TINY)
    # the cast does not saturate: numbers rounded beyond the largest one would become NaN
    return wide_NI.div_(scales_N1).clamp_(-LARGEST, LARGEST).to(FP8), scales_N1
