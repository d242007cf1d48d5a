"""Who owns which block of the key-value pool."""

from __future__ import annotations

from collections.abc import Iterable

SCRATCH = 0  # owned by no row: unwanted tokens are written there


class Blocks:
    """Blocks 1 to `capacity`, each free or held by one or more owners.

    The numbers handed out depend only on the calls made so far, and released numbers are reused first, so that memory
    never touched stays uncommitted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._owners: dict[int, int] = {}
        self._released: list[int] = []
        self._unused = 1  # the lowest number never handed out

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return self.capacity - len(self._owners)

    def take(self, count: int) -> list[int]:
        """Blocks with one owner each; ValueError when fewer are free."""
        if not 0 <= count <= self.free:
            raise ValueError(f"{count} blocks wanted, {self.free} are free")
        reused = [self._released.pop() for _ in range(min(count, len(self._released)))]
        first, self._unused = self._unused, self._unused + count - len(reused)
        taken = [*reused, *range(first, self._unused)]
        self._owners.update(dict.fromkeys(taken, 1))
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """Add an owner to each of these; ValueError for a free block."""
        for block in blocks:
            self._owners[block] = self._owned(block) + 1

    def release(self, blocks: Iterable[int]) -> None:
        """Remove an owner from each of these; a block without owners is free. ValueError for a free block."""
        for block in blocks:
            owners = self._owned(block)
            if owners > 1:
                self._owners[block] = owners - 1
            else:
                del self._owners[block]
                self._released.append(block)

    def _owned(self, block: int) -> int:
        owners = self._owners.get(block)
        if owners is None:
            raise ValueError(f"block {block} is not in use")
        return owners
