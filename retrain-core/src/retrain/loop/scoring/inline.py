"""Asks the verifier about every completion and keeps its three outcomes apart."""

from __future__ import annotations

from collections.abc import Sequence

from retrain.errors import Problem, RewardError
from retrain.plugins.protocols import Reward
from retrain.types import Completion, Example, Outcome, Score

MAX_FAILED_FRAC = 0.1  # of a step's completions: beyond this the verifier is broken, not the answers


def score_completion(reward: Reward, example: Example, text: str) -> Score:
    """The verdict on one text; whatever else the verifier does is a failure, never a number."""
    try:
        score = reward.score(example, text)
        if isinstance(score, Score):
            return score
        return Score.of(score)
    except Exception as error:  # a plugin may raise anything; it is counted and told, and stops the run past a limit
        return Score.failed(f"{type(error).__name__}: {error}")


def score_groups(
    reward: Reward, examples: Sequence[Example], completions: Sequence[Sequence[Completion]]
) -> list[tuple[Score, ...]]:
    """Scores of every completion of a step; RewardError when more than a tenth of them failed."""
    scores = [
        tuple(score_completion(reward, example, completion.text) for completion in group)
        for example, group in zip(examples, completions, strict=True)
    ]
    flat = [score for group in scores for score in group]
    failed = [score for score in flat if score.outcome is Outcome.FAILED]
    if len(failed) > MAX_FAILED_FRAC * len(flat):
        what = f"the reward failed on {len(failed)} of {len(flat)} completions; first: {failed[0].detail}"
        raise RewardError(Problem(where="scoring", what=what, fix="repair the reward or its data"))
    return scores
