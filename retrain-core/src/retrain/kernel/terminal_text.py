"""Text for terminals and logs: levels of console lines, strangers' text made harmless, sparklines."""

from __future__ import annotations

from collections.abc import Sequence

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 60
GROUP_LEVEL = 15  # logging level of the line per group: shown when piped, in the way on a live terminal
OUTCOME_LEVEL = 25  # logging level of how a run ended: said even with --quiet
QUIET_FLAGS = ("-q", "--quiet")


def printable(text: str) -> str:
    """Text with control characters replaced, so that model output or data cannot steer a terminal."""
    return "".join(c if c.isprintable() else "�" for c in text)


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Values in [0, 1] as block characters, squeezed by averaging to at most `width` of them."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    return "".join(BLOCKS[min(int(max(v, 0.0) * len(BLOCKS)), len(BLOCKS) - 1)] for v in means)
