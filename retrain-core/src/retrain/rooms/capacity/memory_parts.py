"""What an estimate is made of: phases, their parts, and their biggest tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from retrain.rooms.capacity import local_backend as local


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor by what it is, its shape and its bytes."""

    name: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}, {self.bytes / local.MIB:.1f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of the step: what is always there on its device (`resident`), what it holds beside that, in bytes.

    `block_bytes` is the size of the blocks that most of it is made of, `at_once` how many completions it works on side
    by side.
    """

    name: str
    resident: Mapping[str, int]
    parts: Mapping[str, int]
    biggest: Tensor
    block_bytes: int = 0
    at_once: int = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes of the phase with all that is always there."""
        return sum(self.resident.values()) + sum(self.parts.values())

    def with_part(self, name: str, size: int) -> Phase:
        """The same with one part more."""
        return replace(self, parts={**self.parts, name: size})

    def together_with(self, other: Phase, *, name: str) -> Phase:
        """Both at the same time in one memory, which has the same things always there."""
        names = dict.fromkeys([*self.parts, *other.parts])
        parts = {each: self.parts.get(each, 0) + other.parts.get(each, 0) for each in names}
        biggest = biggest_of((self.biggest, other.biggest))
        return replace(self, name=name, parts=parts, biggest=biggest, at_once=max(self.at_once, other.at_once))


def biggest_of(tensors: Iterable[Tensor]) -> Tensor:
    """The one of most bytes."""
    return max(tensors, key=lambda tensor: tensor.bytes)


def embedding(vocabulary: int, hidden: int, element: int) -> Tensor:
    """The matrix that every phase holds."""
    return Tensor(name="embedding", shape=(vocabulary, hidden), bytes=vocabulary * hidden * element)


def on_heap(block: int, device: str) -> bool:
    """Whether blocks of this size come from the C library's heap: see `HEAP_BLOCK_BYTES`."""
    return device == "cpu" and block < local.HEAP_BLOCK_BYTES
