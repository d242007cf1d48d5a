"""From the credit of a completion to the rows that are trained."""

from __future__ import annotations

import numpy as np

from retrain.kernel.types import Completion, Floats, TrainRow


def train_rows(completion: Completion, advantages_A: Floats) -> list[TrainRow]:
    """One row for each context that the policy was given: one, unless an episode rewrote its history.

    `advantages_A` has one entry per action token of the completion.
    """
    advantages_T = np.zeros(len(completion.tokens_T))
    advantages_T[completion.action_T] = advantages_A
    ends = (*completion.starts[1:], len(completion.tokens_T))
    parts = [slice(start, end) for start, end in zip(completion.starts, ends, strict=True)]
    return [
        TrainRow(
            tokens_T=completion.tokens_T[part],
            action_T=completion.action_T[part],
            logprobs_T=completion.logprobs_T[part],
            advantages_T=advantages_T[part],
            engine_logprobs_T=None if completion.engine_logprobs_T is None else completion.engine_logprobs_T[part],
        )
        for part in parts
        if completion.action_T[part].any()
    ]
