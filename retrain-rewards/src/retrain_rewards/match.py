r"""The `match` reward: the boxed answer equals the reference, as text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from retrain.api import Example, PluginContext, RewardError, Score
from retrain_rewards.boxed import boxed, last_boxed


@dataclass(frozen=True, slots=True)
class MatchReward:
    """1.0 when the last box of a completion equals the reference, else 0.0; both are trimmed, white space collapsed.

    A completion without a box scores 0.0. Nothing is normalised beyond white space: `0.5` is not `1/2`.
    RewardError on an empty reference, which would make silence correct.
    """

    needs_reference: ClassVar[bool] = True

    def score(self, example: Example, text: str) -> Score:
        """Score one completion."""
        reference = collapsed(example.reference)
        if not reference:
            raise RewardError(f"example {example.id} has an empty reference: nothing can match it")
        answer = last_boxed(text)
        return Score.of(float(answer is not None and collapsed(answer) == reference))

    def gold(self, example: Example) -> str:
        """The reference in a box: it must score 1."""
        return boxed(example.reference)


def make_match(context: PluginContext) -> MatchReward:
    """The `match` reward; it has no parameters."""
    return MatchReward()


def collapsed(text: str) -> str:
    """Trimmed text with every run of white space as one space."""
    return " ".join(text.split())
