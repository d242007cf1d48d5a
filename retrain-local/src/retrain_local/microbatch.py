"""Cuts the rows of an optimizer step into padded micro-batches of like lengths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from retrain.api import BackendError, Floats, Problem, TrainRow

TOKEN_BUDGET = {"cpu": 2048, "cuda": 16384}  # tokens per micro-batch, padding included
LOGIT_BUDGET = 2**29  # elements of its logits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """`ids_BT` right-padded; one entry of each `_N` array per action token, row by row.

    The logits at (`rows_N`, `columns_N`) predict `tokens_N`. `engine_logprobs_N` are `old_logprobs_N` again unless the
    rows tell the two apart.
    """

    ids_BT: Tensor
    rows_N: Tensor
    columns_N: Tensor
    tokens_N: Tensor
    old_logprobs_N: Tensor
    engine_logprobs_N: Tensor
    advantages_N: Tensor


def micro_batches(
    rows: Sequence[TrainRow],
    *,
    device: torch.device,
    vocabulary: int,
    parts: int | None = None,
    max_tokens: int = 0,
    max_logits: int = 0,
) -> list[MicroBatch]:
    """All rows that have action tokens, sorted by length and cut by budget, or into `parts` of like size.

    `max_tokens` and `max_logits`, when not 0, take the place of the device's own budgets.
    """
    kept = sorted((row for row in rows if row.action_T.any()), key=last_action, reverse=True)
    if parts is not None:
        cuts = [group.tolist() for group in np.array_split(np.arange(len(kept)), min(parts, len(kept)))]
    else:
        budget = max_tokens or TOKEN_BUDGET.get(device.type, TOKEN_BUDGET["cuda"])
        cuts = _by_budget(kept, budget, (max_logits or LOGIT_BUDGET) // vocabulary)
    return [_padded([kept[i] for i in cut], device) for cut in cuts]


def _refused(what: str) -> BackendError:
    return BackendError(Problem(what=what, fix="correct the plugin that made the rows"))


def check_rows(rows: Sequence[TrainRow], vocabulary: int) -> None:
    """BackendError, naming row and token, on anything that would train nonsense."""
    for index, row in enumerate(rows):
        length = len(row.tokens_T)
        if not length == len(row.action_T) == len(row.logprobs_T) == len(row.advantages_T):
            raise _refused(f"row {index}: tokens, actions, log-probabilities and advantages differ in length")
        if length and (row.tokens_T.min() < 0 or row.tokens_T.max() >= vocabulary):
            raise _refused(f"row {index} holds a token id outside the model's {vocabulary}")
        if length and row.action_T[0]:
            raise _refused(f"row {index}: its first token is an action, and nothing stands before it to predict it")
        engine_T = _engine_logprobs(row)
        if len(engine_T) != length:
            raise _refused(f"row {index}: tokens and the engine's log-probabilities differ in length")
        for name, values_T in (
            ("log-probability", row.logprobs_T),
            ("engine's log-probability", engine_T),
            ("advantage", row.advantages_T),
        ):
            faulty = np.flatnonzero(row.action_T & ~np.isfinite(values_T))
            if len(faulty):
                raise _refused(f"row {index}: the {name} of token {faulty[0]} is {values_T[faulty[0]]}")


def _engine_logprobs(row: TrainRow) -> Floats:
    return row.logprobs_T if row.engine_logprobs_T is None else row.engine_logprobs_T


def last_action(row: TrainRow) -> int:
    """Column of the last action token: all before it predict something, and nothing else does."""
    return int(np.flatnonzero(row.action_T)[-1])


def _by_budget(rows: Sequence[TrainRow], budget: int, max_actions: int) -> list[list[int]]:
    cuts: list[list[int]] = []
    width, actions = 0, 0
    for index, row in enumerate(rows):  # longest first: the first row of a cut is its width
        count = int(np.count_nonzero(row.action_T))
        full = bool(cuts) and (width * (len(cuts[-1]) + 1) > budget or actions + count > max_actions)
        if not cuts or full:
            cuts.append([])
            width, actions = last_action(row), 0
        cuts[-1].append(index)
        actions += count
    return cuts


def _padded(rows: Sequence[TrainRow], device: torch.device) -> MicroBatch:
    # any id pads: causality hides what comes after
    ids_BT = np.zeros((len(rows), last_action(rows[0])), dtype=np.int64)
    positions = []
    for index, row in enumerate(rows):
        used = last_action(row)
        ids_BT[index, :used] = row.tokens_T[:used]
        positions.append(np.flatnonzero(row.action_T))
    rows_N = np.repeat(np.arange(len(rows)), [len(at_N) for at_N in positions])

    def gathered(values: list[np.ndarray], dtype: torch.dtype) -> Tensor:
        return torch.from_numpy(np.concatenate(values)).to(device=device, dtype=dtype)

    pairs = list(zip(rows, positions, strict=True))
    return MicroBatch(
        ids_BT=torch.from_numpy(ids_BT).to(device),
        rows_N=torch.from_numpy(rows_N).to(device),
        columns_N=gathered([at_N - 1 for at_N in positions], torch.int64),
        tokens_N=gathered([row.tokens_T[at_N] for row, at_N in pairs], torch.int64),
        old_logprobs_N=gathered([row.logprobs_T[at_N] for row, at_N in pairs], torch.float32),
        engine_logprobs_N=gathered([_engine_logprobs(row)[at_N] for row, at_N in pairs], torch.float32),
        advantages_N=gathered([row.advantages_T[at_N] for row, at_N in pairs], torch.float32),
    )
