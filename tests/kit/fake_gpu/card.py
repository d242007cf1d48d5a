"""Cards that a fake GPU can be: their memory and the properties that code asks for."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """`total_bytes` as cudaMemGetInfo reports them; `context_bytes` are the CUDA context, cuBLAS and loaded kernels.

    The rates are what copies and bf16 products of large tensors reach, for a roofline.
    """

    name: str
    total_bytes: int
    context_bytes: int
    capability: tuple[int, int]
    multiprocessors: int
    bytes_per_s: float = 0.0
    operations_per_s: float = 0.0
    count: int = 1

    @property
    def usable_bytes(self) -> int:
        return self.total_bytes - self.context_bytes


H100 = Card(
    name="NVIDIA H100 80GB HBM3",
    total_bytes=85_028_765_696,
    context_bytes=550 * MIB,
    capability=(9, 0),
    multiprocessors=132,
    bytes_per_s=3.0e12,
    operations_per_s=7.9e14,
)
RTX_4090 = Card(
    name="NVIDIA GeForce RTX 4090",
    total_bytes=25_282_281_472,
    context_bytes=450 * MIB,
    capability=(8, 9),
    multiprocessors=128,
    bytes_per_s=0.92e12,
    operations_per_s=1.6e14,
)
RTX_4080 = Card(
    name="NVIDIA GeForce RTX 4080",
    total_bytes=16_859_594_752,
    context_bytes=400 * MIB,
    capability=(8, 9),
    multiprocessors=76,
)
T4 = Card(name="Tesla T4", total_bytes=15_835_660_288, context_bytes=300 * MIB, capability=(7, 5), multiprocessors=40)
