"""The variant of a kernel that Triton would compile for a launch: argument types, alignments, constants, options."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from tests.kit.fake_gpu.record import Argument, Launch

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float64: "fp64",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.bool: "i1",
    torch.float8_e4m3fn: "fp8e4nv",
}
CONSTANT = "constexpr"
INT32 = range(-(2**31), 2**31)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """`type` is Triton's name, or `constexpr` with a `value`."""

    name: str
    type: str
    value: Any = None
    is_aligned: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Specialisation:
    """Hashable; `kernel` is the function of its first launch."""

    name: str
    parameters: tuple[Parameter, ...]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, launch: Launch) -> Specialisation:
        parameters = tuple(_parameter(name, argument) for name, argument in launch.arguments.items())
        return cls(name=launch.name, parameters=parameters, options=tuple(sorted(launch.options.items())))

    def unaligned(self) -> list[str]:
        """Return the pointers and integers that are not known to be multiples of 16."""
        kinds = ("i32", "i64")
        return [p.name for p in self.parameters if not p.is_aligned and (p.type in kinds or p.type.startswith("*"))]


def specialisations(launches: Iterable[Launch]) -> dict[Specialisation, Any]:
    """Return the kernel of each variant."""
    return {Specialisation.of(launch): launch.kernel for launch in launches}


def _parameter(name: str, argument: Argument) -> Parameter:
    value, aligned = argument.value, argument.is_aligned
    if argument.kind == "constant" or (argument.kind == "int" and value == 1):
        return Parameter(name=name, type=CONSTANT, value=value)
    if argument.kind == "pointer":
        return Parameter(name=name, type=f"*{TYPES[value]}", is_aligned=aligned)
    if argument.kind == "int":
        return Parameter(name=name, type="i32" if value in INT32 else "i64", is_aligned=aligned)
    return Parameter(name=name, type={"float": "fp32", "bool": "i1"}[argument.kind])
