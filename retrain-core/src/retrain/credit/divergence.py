"""How far the policy that sampled is from another model, token by token, measured on what it sampled.

`_A` one entry per action token of a completion; d = log p_other - log p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from retrain.credit.algorithm import contexts
from retrain.credit.logprob_gap import LogprobRow
from retrain.kernel.errors import BackendError, Problem
from retrain.kernel.types import MAX_LOG_RATIO, Completion, Floats, Group


def k1(d_A: Floats) -> Floats:
    """-d per token: unbiased for KL(p, p_other) on samples of p, of either sign."""
    return -d_A


def k3(d_A: Floats) -> Floats:
    """e^d - 1 - d per token: unbiased too, never negative, and of less variance near the other model."""
    clamped_A = np.clip(d_A, -MAX_LOG_RATIO, MAX_LOG_RATIO)
    result: Floats = np.expm1(clamped_A) - clamped_A
    return result


def means(differences: Sequence[Floats], prefix: str) -> dict[str, float]:
    """`{prefix}_mean` by k3 and `{prefix}_k1_mean`, over all tokens."""
    d_A = np.concatenate(differences)
    return {f"{prefix}_mean": float(k3(d_A).mean()), f"{prefix}_k1_mean": float(k1(d_A).mean())}


def difference(completion: Completion, other_T: Floats) -> Floats:
    """d of the action tokens, p being the policy that sampled them."""
    result: Floats = (other_T - completion.logprobs_T)[completion.action_T]
    return result


def given_logprobs(
    completions: Sequence[Completion], logprobs: Callable[[list[LogprobRow]], Sequence[Floats]], *, where: str, of: str
) -> list[Floats]:
    """Another model's log-probabilities at the action tokens of each completion, 0 elsewhere.

    Every context that the policy was given is a row of its own, as it is in training. BackendError, with `where` and
    `of` what it was, for a number that is not finite.
    """
    rows = [LogprobRow(c.tokens_T[part], c.action_T[part]) for c in completions for part in contexts(c)]
    answers = iter(logprobs(rows))
    found = []
    for completion in completions:
        values_T = np.zeros(len(completion.tokens_T))
        for part in contexts(completion):
            values_T[part] = next(answers)
        if not np.isfinite(values_T).all():
            what = f"a log-probability of the {of} is not finite"
            raise BackendError(Problem(where=where, what=what, fix="check the model's weights and dtype"))
        found.append(values_T)
    return found


def with_token_rewards(group: Group, rewards: Mapping[int, Floats]) -> Group:
    """The group with rewards of single tokens, by the completion's `id()`, on top of those that it has."""
    completions = []
    for completion in group.completions:
        if id(completion) in rewards:
            before_T = completion.rewards_T
            rewards_T = np.zeros(len(completion.tokens_T)) if before_T is None else before_T.copy()
            rewards_T[completion.action_T] += rewards[id(completion)]
            completion = replace(completion, rewards_T=rewards_T)
        completions.append(completion)
    return replace(group, completions=tuple(completions))
