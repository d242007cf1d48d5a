"""Rows for the older wire, which carries one advantage per sample: credit that varies within a row is refused."""

from __future__ import annotations

import numpy as np

from retrain.api import BackendError, Problem, TrainBatch, TrainRow
from retrain_prime_rl.packing import check_rows
from retrain_prime_rl.wire import ScalarBatch, ScalarSample

TOLERANCE = 1e-6


def scalar_batch(batch: TrainBatch, *, step: int, seq_len: int) -> ScalarBatch:
    """All rows as samples, split before the first action token.

    BackendError when the action tokens of a row have different advantages (by more than 1e-6), or a row is longer than
    `seq_len`, which the trainer would truncate; NonFiniteError on a non-finite number.
    """
    check_rows(batch)
    return ScalarBatch(
        examples=[_sample(row, batch, number, seq_len) for number, row in enumerate(batch.rows)], step=step
    )


def _sample(row: TrainRow, batch: TrainBatch, number: int, seq_len: int) -> ScalarSample:
    if len(row.tokens_T) > seq_len:
        what = f"row {number} has {len(row.tokens_T)} tokens, over seq_len = {seq_len}: the trainer would truncate it"
        raise BackendError(Problem(where=f"step {batch.step}", what=what, fix="raise seq_len here and in the trainer"))
    start = int(row.action_T.argmax())
    tokens_T, action_T, logprobs_T = row.tokens_T[start:], row.action_T[start:], row.logprobs_T[start:]
    return ScalarSample(
        prompt_ids=row.tokens_T[:start].tolist(),
        prompt_mask=[False] * start,
        completion_ids=tokens_T.tolist(),
        completion_mask=action_T.tolist(),
        completion_logprobs=np.where(action_T, logprobs_T, 0.0).tolist(),
        completion_temperatures=[batch.temperature] * len(tokens_T),
        advantage=_one_advantage(row, batch, number),
    )


def _one_advantage(row: TrainRow, batch: TrainBatch, number: int) -> float:
    advantages_T = row.advantages_T[row.action_T]
    low, high = float(advantages_T.min()), float(advantages_T.max())
    if high - low > TOLERANCE:
        what = f"the tokens of row {number} have advantages from {low:.6g} to {high:.6g}"
        why = 'wire = "scalar" carries one advantage per sample, and strict_advantages forbids averaging them'
        fix = 'use wire = "per_token" with PRIME-RL 0.8, or transform_mode = "none" with surprisal_mask_rho = 0'
        raise BackendError(Problem(where=f"step {batch.step}", what=what, why=why, fix=fix))
    return float(advantages_T[0])
