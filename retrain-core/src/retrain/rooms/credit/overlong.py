"""What completions near the limit of their length get: the soft punishment of DAPO."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import numpy as np

from retrain.kernel.types import Completion, Group, Outcome


class SoftPunishment:
    """A shaper: lowers the reward of completions that end in the last `zone` tokens below `limit`.

    A turn of an episode has `limit` tokens for itself, so what counts there is the longest turn.
    """

    def __init__(self, *, limit: int, zone: int) -> None:
        self._limit = limit
        self._zone = zone

    def shape(self, step: int, groups: tuple[Group, ...]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        """The groups with punished rewards; `soft_overlong_mean` over the judged completions, and how many got some."""
        shaped, amounts = [], list[float]()
        for group in groups:
            scores = []
            for completion, score in zip(group.completions, group.scores, strict=True):
                if score.outcome is Outcome.SCORED and score.value is not None:
                    amount = soft_punishment(longest_turn(completion), limit=self._limit, zone=self._zone)
                    amounts.append(amount)
                    score = replace(score, value=score.value + amount) if amount else score
                scores.append(score)
            shaped.append(group.shaped(scores))
        fields = {
            "soft_overlong_mean": float(np.mean(amounts)) if amounts else 0.0,
            "soft_overlong_count": sum(amount < 0.0 for amount in amounts),
        }
        return tuple(shaped), fields


def soft_punishment(length: int, *, limit: int, zone: int) -> float:
    """What a completion of `length` tokens loses, in [-1, 0] (DAPO, arXiv:2503.14476).

    0 up to `limit - zone`, then (limit - zone - length) / zone, and -1 above `limit`.
    """
    if length > limit:
        return -1.0
    return min(0.0, (limit - zone - length) / zone)


def longest_turn(completion: Completion) -> int:
    """Tokens of the longest turn: of the longest run of sampled tokens that no other token and no start interrupts."""
    return max((len(run) for run in _runs(completion)), default=0)


def _runs(completion: Completion) -> Iterable[np.ndarray]:
    positions = np.flatnonzero(completion.action_T)
    is_start = np.isin(positions, completion.starts)
    return np.split(positions, np.flatnonzero((np.diff(positions) > 1) | is_start[1:]) + 1)
