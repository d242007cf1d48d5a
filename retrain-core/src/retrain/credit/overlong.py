"""Long completions: DAPO's soft punishment of their reward, and truncated ones left out of the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from retrain.credit.custom import WrappedAlgorithm
from retrain.kernel.contracts.algorithm import Credit, TokenCredit
from retrain.kernel.types import Completion, Group, Outcome, Score, StopReason


class SoftPunishment:
    """A shaper: lowers the reward of completions that end in the last `zone` tokens below `limit`.

    Each turn of an episode may take `limit` tokens, so the longest turn counts.
    """

    def __init__(self, *, limit: int, zone: int) -> None:
        self._limit = limit
        self._zone = zone

    def shape(self, step: int, groups: tuple[Group, ...]) -> tuple[tuple[Group, ...], Mapping[str, float]]:
        """Punish rewards; return also the mean punishment of judged completions, and how many were punished."""
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
    """Punishment of a completion of `length` tokens, in [-1, 0] (DAPO, arXiv:2503.14476).

    0 up to `limit - zone`, then (limit - zone - length) / zone, and -1 above `limit`.
    """
    if length > limit:
        return -1.0
    return min(0.0, (limit - zone - length) / zone)


def longest_turn(completion: Completion) -> int:
    """Length of the longest turn: a run of sampled tokens without other tokens or a fresh context in between."""
    positions = np.flatnonzero(completion.action_T)
    is_start = np.isin(positions, completion.starts)
    # A run also ends where a fresh context begins, although its positions are adjacent.
    return max(map(len, np.split(positions, np.flatnonzero((np.diff(positions) > 1) | is_start[1:]) + 1)))


class MaskedOverlong(WrappedAlgorithm):
    """An algorithm whose truncated completions are left out of the loss; their rewards stay in the baseline."""

    def assign(self, step: int, groups: Sequence[Group]) -> Credit:
        credit = self.algorithm.assign(step, groups)
        tokens_PG = tuple(
            tuple(map(_masked, group.completions, group.scores, tokens_G)) if credit.trains(number) else tokens_G
            for number, (group, tokens_G) in enumerate(zip(groups, credit.tokens_PG, strict=True))
        )
        rows = tuple(row for row in credit.rows if not row.is_truncated)
        return replace(
            credit,
            tokens_PG=tokens_PG,
            rows=rows,
            num_masked=len(credit.rows) - len(rows),
            masked_groups=tuple(row.group for row in credit.rows if row.is_truncated),
            metrics={**credit.metrics, "overlong_masked_count": sum(t.is_masked for each in tokens_PG for t in each)},
        )


def _masked(completion: Completion, score: Score, tokens: TokenCredit) -> TokenCredit:
    """The credit of a completion in a trained group: none if the completion would be trained but is truncated."""
    # Without a verdict a completion is trained only if the advantage gave it credit.
    is_trained = score.outcome is Outcome.SCORED or bool(tokens.advantages_A.any())
    if completion.stop_reason is not StopReason.LENGTH or not is_trained:
        return tokens
    return replace(tokens, advantages_A=np.zeros(len(tokens.advantages_A)), is_masked=True)
