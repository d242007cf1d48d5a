"""Prefix cache: finished rows whose keys and values stay in the pool for rows that continue them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from retrain.api import Tokens
from retrain_local.sampling.blocks import Blocks

KEPT_ROWS = 256  # of earlier calls: enough for the conversations of many agents that are busy with their tools
TAIL = 16  # trailing tokens of a prefix that serve as its lookup key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """Tokens, and the blocks with the keys and values of all but the last."""

    tokens_T: Tokens
    blocks: list[int]

    @property
    def cached(self) -> int:
        """Tokens with keys and values."""
        return len(self.tokens_T) - 1


class PrefixCache:
    """Finished rows, prompt and completion, until their blocks are needed: the next turn of an episode continues one.

    Only whole rows match, so what is computed depends on the requests alone and not on block boundaries.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._prefixes: dict[bytes, Prefix] = {}  # oldest first
        self._by_tail: dict[tuple[int, bytes], list[Prefix]] = {}  # by length and last tokens

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, prefix: Prefix) -> None:
        """Take over the blocks of a finished row; equal tokens are stored once."""
        key = prefix.tokens_T.tobytes()
        if key in self._prefixes:
            self._blocks.release(prefix.blocks)
            return
        self._prefixes[key] = prefix
        self._by_tail.setdefault(_tail(prefix.tokens_T), []).append(prefix)

    def longest(self, prompt_T: Tokens) -> Prefix | None:
        """The longest cached row that is a prefix of the prompt."""
        for length in sorted({length for length, _ in self._by_tail if length <= len(prompt_T)}, reverse=True):
            for prefix in self._by_tail.get(_tail(prompt_T[:length]), ()):
                if np.array_equal(prefix.tokens_T, prompt_T[:length]):
                    return prefix
        return None

    def drop_oldest(self) -> bool:
        """Release the blocks of the oldest row; False when there is none."""
        if not self._prefixes:
            return False
        prefix = self._prefixes.pop(next(iter(self._prefixes)))
        tail = _tail(prefix.tokens_T)
        self._by_tail[tail].remove(prefix)
        if not self._by_tail[tail]:
            del self._by_tail[tail]
        self._blocks.release(prefix.blocks)
        return True

    def keep_youngest(self, count: int) -> None:
        """Release the blocks of all rows but the last `count`."""
        while len(self) > count:
            self.drop_oldest()

    def clear(self) -> None:
        """Release all blocks."""
        self.keep_youngest(0)


def _tail(tokens_T: Tokens) -> tuple[int, bytes]:
    return len(tokens_T), tokens_T[-TAIL:].tobytes()
