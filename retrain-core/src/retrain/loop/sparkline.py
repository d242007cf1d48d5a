"""A curve in one line of text."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 60


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values in [0, 1] as block characters, squeezed by averaging to at most `width` of them."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    return "".join(BLOCKS[min(int(max(v, 0.0) * len(BLOCKS)), len(BLOCKS) - 1)] for v in means)
