"""Converts rows to the datums of the service: aligned to the next token, and scaled to the mean over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from retrain.api import BackendError, Floats, Mask, NonFiniteError, Problem, Tokens, TrainRow

Reduction = Literal["token_sum", "sequence_mean"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Datum:
    """One row, shifted: position t holds an input token and the data of the token predicted from it.

    All arrays are one shorter than the row. `logprobs_T` and `advantages_T` are 0 where `action_T` is False: prompt and
    environment tokens are read but not trained.
    """

    inputs_T: Tokens
    targets_T: Tokens
    action_T: Mask
    logprobs_T: Floats
    advantages_T: Floats

    @classmethod
    def of(cls, row: TrainRow) -> Datum:
        """Inputs are tokens[:-1]; targets, log-probabilities and advantages belong to tokens[1:]."""
        action_T = row.action_T[1:]
        return cls(
            inputs_T=row.tokens_T[:-1],
            targets_T=row.tokens_T[1:],
            action_T=action_T,
            logprobs_T=np.where(action_T, row.logprobs_T[1:], 0.0),
            advantages_T=np.where(action_T, row.advantages_T[1:], 0.0),
        )

    def weighted(self, factors_N: Floats, logprobs_N: Floats) -> Datum:
        """A copy with new log-probabilities, and advantages times a factor, both given per action token."""
        logprobs_T, advantages_T = np.zeros(len(self.targets_T)), self.advantages_T.copy()
        logprobs_T[self.action_T] = logprobs_N
        advantages_T[self.action_T] *= factors_N
        return replace(self, logprobs_T=logprobs_T, advantages_T=advantages_T)


def scales(datums: Sequence[Datum], reduction: Reduction, denominators: Sequence[int]) -> list[float]:
    """Factor per datum for its advantages, with which the service divides its terms by the datum's denominator.

    With N datums of L_i targets each and denominators d_i (for a mean over tokens, the action tokens of all datums), a
    sum over tokens needs 1 / d_i. A mean over each datum followed by a mean over datums divides token losses by L_i N,
    prompts included, and needs L_i N / d_i.
    """
    if reduction == "token_sum":
        return [1.0 / denominator for denominator in denominators]
    return [len(d.targets_T) * len(datums) / n for d, n in zip(datums, denominators, strict=True)]


def untrained_row(tokens_T: Tokens, action_T: Mask) -> TrainRow:
    """A row whose action tokens are only evaluated: its log-probabilities and advantages are 0."""
    zeros_T = np.zeros(len(tokens_T))
    return TrainRow(tokens_T=tokens_T, action_T=action_T, logprobs_T=zeros_T, advantages_T=zeros_T)


def check_rows(rows: Sequence[TrainRow]) -> None:
    """BackendError on a malformed row, NonFiniteError on a non-finite number; both name the row."""
    for index, row in enumerate(rows):
        length = len(row.tokens_T)
        if not length == len(row.action_T) == len(row.logprobs_T) == len(row.advantages_T):
            raise _refused(f"row {index}: tokens, actions, log-probabilities and advantages differ in length")
        if length < 2 or row.action_T[0]:
            raise _refused(f"row {index}: no token precedes its first action to predict it from")
        for name, values_T in (("log-probability", row.logprobs_T), ("advantage", row.advantages_T)):
            faulty = np.flatnonzero(row.action_T & ~np.isfinite(values_T))
            if len(faulty):
                what = f"row {index}: the {name} of token {faulty[0]} is {values_T[faulty[0]]}"
                fix = "correct the plugin that made the rows"
                raise NonFiniteError(Problem(where="training", what=what, fix=fix))
    if not any(row.action_T.any() for row in rows):
        what = "nothing to train on: no row of the batch has an action token"
        fix = "give at least one row with a token that the policy sampled"
        raise BackendError(Problem(where="training", what=what, fix=fix))


def _refused(what: str) -> BackendError:
    return BackendError(Problem(where="training", what=what, fix="correct the plugin that made the rows"))
