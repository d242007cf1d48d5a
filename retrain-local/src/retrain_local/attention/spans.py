"""The segments of a packed row: which tokens belong together, and which prefix they continue."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.api import Tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Segments of a packed row, one after another: `lengths[s]` tokens each.

    A token of segment s attends to the tokens of its own segment up to itself and, if `prefixes[s]` >= 0, to all tokens
    of that earlier segment, whose positions it continues. A prefix has no prefix of its own. The prompt of a group is
    thus stored once, and each completion is a segment after it.
    """

    lengths: tuple[int, ...]
    prefixes: tuple[int, ...]

    @classmethod
    def apart(cls, lengths: Sequence[int]) -> Spans:
        """Rows without shared prefixes."""
        return cls(lengths=tuple(lengths), prefixes=(-1,) * len(lengths))

    @property
    def starts(self) -> tuple[int, ...]:
        """Start of each segment, followed by the end of the last one."""
        return (0, *np.cumsum(self.lengths, dtype=np.int64).tolist())

    @property
    def num_tokens(self) -> int:
        """Tokens in the packed row."""
        return sum(self.lengths)

    def positions(self) -> Tokens:
        """Position of every token in the row that it belongs to, [num_tokens]."""
        before = [self.lengths[prefix] if prefix >= 0 else 0 for prefix in self.prefixes]
        parts = [np.arange(n, n + length) for n, length in zip(before, self.lengths, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)
