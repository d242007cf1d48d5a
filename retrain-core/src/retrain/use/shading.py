"""A policy's words for a terminal: made harmless, and coloured by a number per token."""

from __future__ import annotations

from collections.abc import Sequence

import click
import numpy as np

from retrain.kernel.types import Floats
from retrain.text.terminal_text import printable

UNSURE = 2.5  # nats; at this entropy the colour is full
FAINTEST = 0.04  # of the full colour; below it none is given
Colour = tuple[int, int, int]
# The other end of a scale that begins at white; black text on them has a contrast of more than 7.
ORANGE, GREEN, RED = (255, 145, 45), (70, 205, 110), (255, 130, 120)


def harmless(text: str) -> str:
    """Text that may have several lines, without characters that could steer a terminal."""
    return "\n".join(printable(line.replace("\t", "    ")) for line in text.split("\n"))


def shaded(text: str, depth: float, colour: Colour) -> str:
    """The text on a colour as deep as `depth` in [0, 1] says."""
    if depth < FAINTEST or not text:
        return harmless(text)
    red, green, blue = (round(255 - (255 - end) * min(depth, 1.0)) for end in colour)
    # a background that crosses a line break fills the rest of the line
    parts = [click.style(p, fg="black", bg=(red, green, blue)) if p else "" for p in harmless(text).split("\n")]
    return "\n".join(parts)


def by_entropy(text: str, entropy: float) -> str:
    """The text as unsure as the policy was when it wrote it: white is certain, orange is not."""
    return shaded(text, entropy / UNSURE, ORANGE)


def by_credit(texts: Sequence[str], credit_A: Floats, largest: float) -> str:
    """The texts of tokens: green for credit, red for blame, full at the `largest` of all that is shown."""
    depths_A = np.sqrt(np.abs(credit_A) / largest) if largest > 0.0 else np.zeros(len(credit_A))
    pairs = zip(texts, depths_A.tolist(), (credit_A > 0).tolist(), strict=True)
    return "".join(shaded(text, depth, GREEN if is_praise else RED) for text, depth, is_praise in pairs)
