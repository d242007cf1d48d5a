"""`[model] quantize`: frozen matrices of 4 or 8 bits, expanded whenever they are used (QLoRA, arXiv:2305.14314).

Trainer and sampler expand the same stored numbers, so both compute with the same matrix W' and the same adapter.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor

from retrain_local.model.weights import Linear

BLOCK = 64  # numbers of a row that share a scale in nf4


def silence_advice() -> None:
    """Have bitsandbytes, which PEFT imports, not warn of a missing kernel that is not used here."""
    logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


class Nf4:
    """Blocks of 64 numbers, each one of 16 quantiles of a normal distribution times the block's largest number."""

    def __init__(self, weight_OI: Tensor) -> None:
        silence_advice()
        from bitsandbytes.functional import quantize_4bit  # seconds to import

        # as one row: bitsandbytes 0.50 on a CPU expands a matrix wrongly if its rows are not whole blocks
        self._shape, flat = weight_OI.shape, weight_OI.reshape(1, -1)
        self._packed, self._state = quantize_4bit(flat, blocksize=BLOCK, quant_type="nf4")

    def expanded(self, dtype: torch.dtype) -> Tensor:
        from bitsandbytes.functional import dequantize_4bit

        return dequantize_4bit(self._packed, self._state).view(self._shape).to(dtype)

    def to(self, device: torch.device) -> Nf4:
        if self._packed.device == device:
            return self
        moved = copy.copy(self)
        state: Any = copy.deepcopy(self._state)
        state.to(device)  # in place
        moved._packed, moved._state = self._packed.to(device), state
        return moved


class Int8:
    """Integers from -127 to 127 times a scale for each row, rounded to the nearest."""

    def __init__(self, weight_OI: Tensor) -> None:
        largest_O1 = weight_OI.float().abs().amax(dim=1, keepdim=True).clamp_(min=1e-12)
        self._scales_O1 = largest_O1 / 127.0
        self._packed = (weight_OI.float() / self._scales_O1).round_().to(torch.int8)

    def expanded(self, dtype: torch.dtype) -> Tensor:
        # one pass, with fp32 in registers only
        return torch.mul(self._packed, self._scales_O1, out=self._packed.new_empty(self._packed.shape, dtype=dtype))

    def to(self, device: torch.device) -> Int8:
        moved = copy.copy(self)
        moved._packed, moved._scales_O1 = self._packed.to(device), self._scales_O1.to(device)
        return moved


Stored: TypeAlias = Nf4 | Int8  # a matrix in fewer bits; `expanded` is W' [outputs, inputs]
KINDS: dict[str, Callable[[Tensor], Stored]] = {"nf4": Nf4, "int8": Int8}


class QuantisedLinear(Linear):
    """A `Linear` that keeps `stored` in place of its weight W', and expands it for every use."""

    _stored: Stored
    _dtype: torch.dtype

    def __init__(self, linear: Linear, stored: Stored, bias: Tensor | None, dtype: torch.dtype) -> None:
        given: dict[str, Any] = {"bias": bias, "names": linear.names, "sizes": linear.sizes, "stacked": None}
        for name, value in (given | {"_stored": stored, "_dtype": dtype}).items():
            object.__setattr__(self, name, value)  # a frozen dataclass

    @property
    def weight(self) -> Tensor:
        return self._stored.expanded(self._dtype)

    def to(self, device: torch.device, dtype: torch.dtype) -> Linear:
        bias = None if self.bias is None else self.bias.to(device, dtype)
        return QuantisedLinear(self, self._stored.to(device), bias, dtype)


def quantiser(kind: str) -> Callable[[Linear], Linear] | None:
    if kind not in KINDS:
        return None
    make = KINDS[kind]
    return lambda linear: QuantisedLinear(linear, make(linear.weight), linear.bias, linear.weight.dtype)
