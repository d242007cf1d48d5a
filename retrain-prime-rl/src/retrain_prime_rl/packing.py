"""Rows as messages to the trainer: micro-batches of its sequence length, or samples of the older wire."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from retrain.api import BackendError, NonFiniteError, Problem, TrainBatch, TrainRow

# As in PRIME-RL; any id would do, since the loss does not count it.
PADDING_TOKEN = 1
TOLERANCE = 1e-6  # between the advantages of one row: rounding of equal credit


class MicroBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """One forward and backward pass of one data rank: packed samples, one after another.

    All per-token lists have the length of `input_ids`. `position_ids` restart at 0 with every packed sample, whose
    lengths `sequence_lengths` and `seq_lens` list; both sum to the length. `inference_logprobs` (nats) and
    `advantages` are 0 where `loss_mask` is False. The optional fields belong to features that are not used here.
    """

    input_ids: list[int]
    loss_mask: list[bool]
    advantages: list[float]
    inference_logprobs: list[float]
    position_ids: list[int]
    sequence_lengths: list[int]
    temperatures: list[float]
    env_names: list[str]
    seq_lens: list[int]
    ref_logprobs: list[float] | None = None
    routed_experts: Any = None
    mm_kwargs: Any = None
    mm_token_type_ids: list[int] | None = None
    rl_weights: list[float] | None = None
    ce_weights: list[float] | None = None
    ref_kl_weights: list[float] | None = None


class ScalarSample(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """A sample of the older wire. `completion_mask` is False at the tokens of an environment; `advantage` is one."""

    prompt_ids: list[int]
    prompt_mask: list[bool]
    completion_ids: list[int]
    completion_mask: list[bool]
    completion_logprobs: list[float]
    completion_temperatures: list[float]
    teacher_logprobs: list[float] | None = None
    advantage: float | None = None


class ScalarBatch(msgspec.Struct, array_like=True, omit_defaults=True, gc=False):
    """All samples of one step of the older wire."""

    examples: list[ScalarSample]
    step: int


def encode(message: list[MicroBatch] | ScalarBatch) -> bytes:
    return msgspec.msgpack.encode(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The trainer's expectations of a step: tokens of a micro-batch, data ranks, padding, and the task's name.

    The trainer groups its statistics by `env_name`; it reserves "all".
    """

    seq_len: int
    ranks: int = 1
    pad_to_multiple_of: int = 1
    env_name: str = "retrain"


def pack(batch: TrainBatch, layout: Layout) -> list[list[MicroBatch]]:
    """Return one list of micro-batches per rank, all of one length; every row is whole in exactly one of them.

    Equal batches give equal lists. A rank without work gets a copy of the shortest micro-batch in which no token
    counts. BackendError on a row longer than `seq_len`, NonFiniteError on a non-finite number; nothing is sent then.
    """
    check_rows(batch)
    lengths = [len(row.tokens_T) for row in batch.rows]
    if max(lengths) > layout.seq_len:
        what = f"a row of {max(lengths)} tokens does not fit in a micro-batch of seq_len = {layout.seq_len}"
        fix = "raise seq_len here and in the trainer's configuration, or lower [training] max_tokens"
        raise BackendError(Problem(code="prime-rl.row-too-long", where="[backend.options] seq_len", what=what, fix=fix))
    bins = partition(lengths, capacity=layout.seq_len, multiple_of=layout.ranks)
    rows = [[batch.rows[index] for index in sorted(places)] for places in bins]
    packed = [_micro_batch(part, batch.temperature, layout) for part in rows if part]
    shortest = min(packed, key=lambda part: len(part.input_ids))
    length = len(shortest.input_ids)
    # computed by a rank without rows, so that no other rank waits for it
    idle = msgspec.structs.replace(shortest, loss_mask=[False] * length, advantages=[0.0] * length)
    packed += [idle] * (len(bins) - len(packed))
    return [packed[rank :: layout.ranks] for rank in range(layout.ranks)]


def partition(lengths: Sequence[int], *, capacity: int, multiple_of: int) -> list[list[int]]:
    """Return the indices of the lengths in bins of `capacity`, about equally full; empty bins come last.

    Greedy, longest first into the emptiest bin (the first among equals), with the smallest number of bins, a multiple
    of `multiple_of`, for which that succeeds; with one bin per length it always does.
    """
    # The sort is stable, so equal batches give equal bins.
    order = sorted(range(len(lengths)), key=lambda place: -lengths[place])
    count = -(-sum(lengths) // (capacity * multiple_of)) * multiple_of
    while True:
        loads = np.zeros(count, dtype=np.int64)
        bins: list[list[int]] = [[] for _ in range(count)]
        for place in order:
            emptiest = int(loads.argmin())
            if loads[emptiest] + lengths[place] > capacity:
                break
            loads[emptiest] += lengths[place]
            bins[emptiest].append(place)
        else:
            return bins
        count += multiple_of


def check_rows(batch: TrainBatch) -> None:
    for number, row in enumerate(batch.rows):
        for name, values_T in (("log-probability", row.logprobs_T), ("advantage", row.advantages_T)):
            if not np.isfinite(values_T[row.action_T]).all():
                what = f"row {number} holds a {name} that is not finite"
                fix = "correct the plugin that made the rows"
                where, why = f"step {batch.step}", "nothing was sent"
                raise NonFiniteError(Problem(code="prime-rl.non-finite-row", where=where, what=what, why=why, fix=fix))


def _micro_batch(rows: Sequence[TrainRow], temperature: float, layout: Layout) -> MicroBatch:
    """Pad as PRIME-RL does: the last sequence grows, and positions restart in it; no token of the padding counts."""
    lengths = [len(row.tokens_T) for row in rows]
    padding = -sum(lengths) % layout.pad_to_multiple_of
    names = ("tokens_T", "action_T", "advantages_T", "logprobs_T")
    tokens_T, action_T, advantages_T, logprobs_T = (
        np.concatenate([getattr(row, name) for row in rows]) for name in names
    )
    sequence_lengths = [*lengths[:-1], lengths[-1] + padding]
    return MicroBatch(
        input_ids=tokens_T.tolist() + [PADDING_TOKEN] * padding,
        loss_mask=action_T.tolist() + [False] * padding,
        advantages=np.where(action_T, advantages_T, 0.0).tolist() + [0.0] * padding,
        inference_logprobs=np.where(action_T, logprobs_T, 0.0).tolist() + [0.0] * padding,
        position_ids=[position for length in (*lengths, padding) for position in range(length)],
        sequence_lengths=sequence_lengths,
        temperatures=[temperature] * len(tokens_T) + [1.0] * padding,
        env_names=[layout.env_name] * len(tokens_T) + [""] * padding,
        seq_lens=sequence_lengths,
    )


def scalar_batch(batch: TrainBatch, *, step: int, seq_len: int) -> ScalarBatch:
    """Return all rows as samples, split before the first action token.

    BackendError when the action tokens of a row have different advantages (by more than 1e-6), or a row is longer than
    `seq_len`, where the trainer would truncate it; NonFiniteError on a non-finite number.
    """
    check_rows(batch)
    examples = []
    for number, row in enumerate(batch.rows):
        where, count = f"step {batch.step}", len(row.tokens_T)
        if count > seq_len:
            what = f"row {number} has {count} tokens, over seq_len = {seq_len}: the trainer would truncate it"
            fix = "raise seq_len here and in the trainer"
            raise BackendError(Problem(code="prime-rl.row-too-long", where=where, what=what, fix=fix))
        advantages_T = row.advantages_T[row.action_T]
        low, high = float(advantages_T.min()), float(advantages_T.max())
        if high - low > TOLERANCE:
            what = f"the tokens of row {number} have advantages from {low:.6g} to {high:.6g}"
            why = 'wire = "scalar" carries one advantage per sample, and strict_advantages forbids averaging them'
            fix = 'use wire = "per_token" with PRIME-RL 0.8, or transform_mode = "none" with surprisal_mask_rho = 0'
            raise BackendError(Problem(code="prime-rl.token-credit", where=where, what=what, why=why, fix=fix))
        start = int(row.action_T.argmax())
        action_T = row.action_T[start:]
        examples.append(
            ScalarSample(
                prompt_ids=row.tokens_T[:start].tolist(),
                prompt_mask=[False] * start,
                completion_ids=row.tokens_T[start:].tolist(),
                completion_mask=action_T.tolist(),
                completion_logprobs=np.where(action_T, row.logprobs_T[start:], 0.0).tolist(),
                completion_temperatures=[batch.temperature] * len(action_T),
                advantage=float(advantages_T[0]),
            )
        )
    return ScalarBatch(examples=examples, step=step)
