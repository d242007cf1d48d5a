"""Scores of texts that were scored before."""

from __future__ import annotations

import hashlib
from collections import OrderedDict

from retrain.kernel.types import Example, Outcome, Score

MAX_ENTRIES = 2**14  # about 500 bytes each

Key = tuple[int, str, bytes]


def key_of(reward: int, example: Example, text: str) -> Key:
    """Equal for equal scores: the reward, the example's id, and a digest of the text."""
    digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
    return reward, example.id, digest


class VerdictCache:
    """The most recently used verdicts; failures are not kept, since they may be temporary.

    It only saves work: no score or metric may depend on it, or a resumed run, whose cache is empty, would differ.
    """

    def __init__(self, max_entries: int = MAX_ENTRIES) -> None:
        self._max_entries = max_entries
        self._scores: OrderedDict[Key, Score] = OrderedDict()

    def get(self, key: Key) -> Score | None:
        """The verdict, None when there is none."""
        score = self._scores.get(key)
        if score is not None:
            self._scores.move_to_end(key)
        return score

    def put(self, key: Key, score: Score) -> None:
        """Keep a verdict, unless it is a failure."""
        if score.outcome is Outcome.FAILED:
            return
        self._scores[key] = score
        self._scores.move_to_end(key)
        if len(self._scores) > self._max_entries:
            self._scores.popitem(last=False)
