"""A reward that a table of bigrams can learn: does the answer begin with a digit?"""

from __future__ import annotations


def score(completion: str, reference: str) -> float:
    """1.0 when it does; whether the answer is right does not matter."""
    return float(completion.strip()[:1].isdigit())
