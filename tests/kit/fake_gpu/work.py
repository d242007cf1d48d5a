"""Bytes that a launch moves and operations that it does, by the shapes of its tensors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

PRODUCTS = {"mm": 0, "bmm": 0, "_scaled_mm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1}  # index of the left matrix
GATHERS = frozenset({"index_select", "gather", "embedding", "index"})
WRITES = frozenset({"index_copy_"})
OVERWRITES = frozenset({"copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    calls: int = 0
    moved_bytes: float = 0.0
    operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(
            calls=self.calls + other.calls,
            moved_bytes=self.moved_bytes + other.moved_bytes,
            operations=self.operations + other.operations,
        )

    def __sub__(self, other: Work) -> Work:
        return self + other * -1

    def __mul__(self, times: float) -> Work:
        return Work(
            calls=round(self.calls * times),
            moved_bytes=self.moved_bytes * times,
            operations=self.operations * times,
        )

    def seconds(self, bytes_per_s: float, operations_per_s: float) -> float:
        """Return the larger of the two times: at best they overlap."""
        return max(self.moved_bytes / bytes_per_s, self.operations / operations_per_s)


def work_of(name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> Work:
    """Return the work of one launch. Attention's operations depend on lengths and are left out."""
    if name in GATHERS:
        moved = 2 * sum(map(covered_bytes, outputs))
    elif name in WRITES:
        moved = 2 * covered_bytes(inputs[-1])
    else:
        # A view that is given twice is counted once, unless it is updated: then it is read and written.
        seen = {(x.untyped_storage()._cdata, x.storage_offset(), tuple(x.shape)): x for x in (*inputs, *outputs)}
        moved = sum(covered_bytes(x) for x in seen.values() if x.is_cuda)
        if name.endswith("_") and name not in OVERWRITES:
            moved += sum(map(covered_bytes, outputs))
    left = PRODUCTS.get(name)
    operations = 0 if left is None else 2 * inputs[left].numel() * inputs[left + 1].shape[-1]
    return Work(calls=1, moved_bytes=moved, operations=operations)


def covered_bytes(x: Tensor) -> int:
    """Return the bytes that a view covers, a broadcast axis counted once."""
    sizes = [size for size, stride in zip(x.shape, x.stride(), strict=True) if stride]
    return int(math.prod(sizes) * x.element_size())
