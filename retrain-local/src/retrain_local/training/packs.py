"""Packs the rows of an optimizer step without padding; the prompt of a group is stored once per pack."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from retrain.api import ActionRow, BackendError, Floats, Problem, TrainRow
from retrain_local.attention.packed import Picks, Spans
from retrain_local.memory.sizes import Rows


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ActionTokens:
    """The action tokens of several rows, row by row, with their numbers; each row is one sequence of the loss.

    `rows` are the indices of the rows in the step; `sequences_M` numbers the rows from 0, and `turns_M` all turns, on
    the CPU: few losses need them.
    """

    rows: tuple[int, ...]
    sequences_M: Tensor
    turns_M: np.ndarray
    behaviour_logprobs_M: Tensor
    engine_logprobs_M: Tensor
    advantages_M: Tensor

    @classmethod
    def of(
        cls,
        numbers: Sequence[int],
        rows: Sequence[TrainRow],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        **more: Any,
    ) -> Self:
        def actions(values: Sequence[np.ndarray]) -> Tensor:
            return joined([v[row.action_T] for v, row in zip(values, rows, strict=True)], dtype, device)

        counts = [int(np.count_nonzero(row.action_T)) for row in rows]
        sequences_M = np.repeat(np.arange(len(rows)), counts)
        # Numbers that grow from token to token, so that `unique` numbers all turns of the pack from 0.
        places = [np.zeros(len(row.tokens_T), np.int64) if row.turns_T is None else row.turns_T for row in rows]
        turns_M = np.concatenate([places_T[row.action_T] for places_T, row in zip(places, rows, strict=True)])
        turns_M = np.unique(sequences_M * (turns_M.max(initial=0) + 1) + turns_M, return_inverse=True)[1]
        return cls(
            rows=tuple(numbers),
            sequences_M=joined([sequences_M], torch.int64, device),
            turns_M=turns_M,
            behaviour_logprobs_M=actions([row.logprobs_T for row in rows]),
            engine_logprobs_M=actions([engine_logprobs(row) for row in rows]),
            advantages_M=actions([row.advantages_T for row in rows]),
            **more,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pack(ActionTokens):
    """N packed tokens of several rows, and the M action tokens that they predict.

    Action m is `tokens_M[m]`, predicted from position `sources.index_M[m]` of the pack; the first actions of a group
    are all predicted from the last token of its shared prompt. `longest` is the length of the longest row.
    `experts_NLK` are those that the sampler's pass over each token chose, -1 where unknown.
    """

    longest: int
    spans: Spans
    ids_N: Tensor
    positions_N: Tensor
    sources: Picks
    tokens_M: Tensor
    experts_NLK: Tensor | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """A row of a group and its index among the rows; its first action is at index `first`, its last one at `last`."""

    number: int
    row: TrainRow
    first: int
    last: int


def pack_rows(
    rows: Sequence[TrainRow], *, device: torch.device, max_tokens: int, share: bool = True, multiple: int = 1
) -> list[Pack]:
    """Pack all rows with action tokens, at most `max_tokens` in a pack; a longer row gets its own.

    With `share`, rows that agree up to their first action store that prefix once in each pack. Packs are of about equal
    size, and their number is a multiple of `multiple` if the rows allow it. The order depends on the rows only.
    """
    groups = grouped_rows(rows, share=share)
    cuts = list(cut_groups(groups, max_tokens))
    if len(cuts) > 1:
        cuts = _cut_evenly(groups, -(-len(cuts) // multiple) * multiple, max_tokens)
    return [_pack(cut, device) for cut in cuts]


def _cut_evenly(groups: list[list[Member]], count: int, most: int) -> list[list[list[Member]]]:
    """Cut into at most `count` packs, the largest as small as possible; packs of `most` tokens are few enough."""
    sizes = range(1, most)
    best = bisect_left(sizes, True, key=lambda size: sum(1 for _ in cut_groups(groups, size)) <= count)
    return list(cut_groups(groups, sizes[best] if best < len(sizes) else most))


def grouped_rows(rows: Sequence[TrainRow], *, share: bool = True) -> list[list[Member]]:
    """Group rows with actions by the tokens before the first one, the longest first; without `share` each by itself."""
    groups: dict[bytes | int, list[Member]] = {}
    for number, row in enumerate(rows):
        actions = np.flatnonzero(row.action_T)
        if len(actions):
            member = Member(number=number, row=row, first=int(actions[0]), last=int(actions[-1]))
            groups.setdefault(row.tokens_T[: member.first].tobytes() if share else number, []).append(member)
    for members in groups.values():
        members.sort(key=lambda member: -member.last)
    return sorted(groups.values(), key=lambda members: -members[0].last)


def lengths_of(rows: Sequence[TrainRow]) -> Rows:
    """Return the lengths of a step whose packs hold whole groups."""
    groups = grouped_rows(rows)
    alone = [member.last for members in groups for member in members]
    shared = sum(members[0].first + sum(member.last - member.first for member in members) for members in groups)
    prompt = max((members[0].first for members in groups), default=0)
    return Rows(longest=max(alone, default=1), prompt=prompt, repeats=sum(alone) / max(1, shared))


def cut_groups(groups: list[list[Member]], max_tokens: int) -> Iterator[list[list[Member]]]:
    """Yield runs of rows of at most `max_tokens`, with a group's prefix counted once in each, or one longer row."""
    pack: list[list[Member]] = []
    used = 0
    for members in groups:
        opened = False
        for member in members:
            own = member.last - member.first
            cost = own if opened else member.last
            if pack and used + cost > max_tokens:
                yield pack
                pack, used, opened = [], 0, False
                cost = member.last
            if not opened:
                pack.append([])
                opened = True
            pack[-1].append(member)
            used += cost
    if pack:
        yield pack


def _pack(groups: list[list[Member]], device: torch.device) -> Pack:
    lengths: list[int] = []
    prefixes: list[int] = []
    ids, places, members, experts = [], [], [], list[np.ndarray]()
    start = 0

    def segment(row: TrainRow, first: int, last: int, prefix: int) -> int:
        nonlocal start
        tokens_T = row.tokens_T[first:last]
        # The experts of a token are in the pass over the token before it.
        if row.experts_TLK is not None:
            experts.append(row.experts_TLK[first + 1 : last + 1])
        lengths.append(len(tokens_T))
        prefixes.append(prefix)
        ids.append(tokens_T)
        start += len(tokens_T)
        return start - len(tokens_T)

    for group in groups:
        is_single = len(group) == 1
        member = group[0]
        prompt_start = segment(member.row, 0, member.last if is_single else member.first, -1)
        prompt = len(lengths) - 1
        for member in group:
            begun = prompt_start + member.first
            if not is_single and member.last > member.first:
                begun = segment(member.row, member.first, member.last, prompt)
            # -1: predicted from the last token of the prompt
            at_M = np.flatnonzero(member.row.action_T) - 1 - member.first
            places.append(np.where(at_M < 0, prompt_start + member.first - 1, begun + at_M))
            members.append(member)
    spans = Spans(lengths=tuple(lengths), prefixes=tuple(prefixes))
    rows = [member.row for member in members]

    return Pack.of(
        [member.number for member in members],
        rows,
        device=device,
        longest=max(member.last for member in members),
        spans=spans,
        ids_N=joined(ids, torch.int64, device),
        positions_N=joined([spans.positions()], torch.int64, device),
        sources=Picks(np.concatenate(places), spans.num_tokens, device),
        tokens_M=joined([row.tokens_T[row.action_T] for row in rows], torch.int64, device),
        experts_NLK=joined(experts, torch.int16, device) if experts else None,
    )


def joined(values: Sequence[np.ndarray], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    return torch.from_numpy(np.concatenate(values)).to(device=device, dtype=dtype)


def untrained(rows: Sequence[ActionRow]) -> list[TrainRow]:
    """Return rows of these tokens, for what is only computed at them."""
    zeros = [np.zeros(len(row.tokens_T)) for row in rows]
    return [
        TrainRow(tokens_T=row.tokens_T, action_T=row.action_T, logprobs_T=zeros_T, advantages_T=zeros_T)
        for row, zeros_T in zip(rows, zeros, strict=True)
    ]


def split_by_row(values_N: np.ndarray, rows: Sequence[ActionRow]) -> list[np.ndarray]:
    ends = np.cumsum([np.count_nonzero(row.action_T) for row in rows])
    return np.split(values_N, ends[:-1])


def check_rows(rows: Sequence[TrainRow], vocabulary: int) -> None:
    for index, row in enumerate(rows):
        length, engine_T, reference_T = len(row.tokens_T), engine_logprobs(row), reference_logprobs(row)
        if not length == len(row.action_T) == len(row.logprobs_T) == len(row.advantages_T) == len(engine_T):
            what = f"row {index}: tokens, actions, log-probabilities and advantages differ in length"
            raise _refused(what=what, code="backend.row-lengths")
        if length and (row.tokens_T.min() < 0 or row.tokens_T.max() >= vocabulary):
            what = f"row {index} holds a token id outside the model's {vocabulary}"
            raise _refused(what=what, code="backend.row-unknown-token")
        if length and row.action_T[0]:
            what = f"row {index}: its first token is an action, and no token precedes it to predict it from"
            raise _refused(what=what, code="backend.row-first-action")
        if len(reference_T) != length or (row.kl_coef and row.reference_logprobs_T is None):
            what = f"row {index} has a KL coefficient and no reference log-probability for each of its tokens"
            raise _refused(what=what, code="backend.row-no-reference")
        # The sampler's come first: without an engine's or a reference's own numbers these are the sampler's again.
        for name, values_T in (
            ("log-probability", row.logprobs_T),
            ("engine's log-probability", engine_T),
            ("reference's log-probability", reference_T),
            ("advantage", row.advantages_T),
        ):
            faulty = np.flatnonzero(row.action_T & ~np.isfinite(values_T))
            if len(faulty):
                what = f"row {index}: the {name} of token {faulty[0]} is {values_T[faulty[0]]}"
                raise _refused(what=what, code="backend.row-non-finite")


def engine_logprobs(row: TrainRow) -> Floats:
    return row.logprobs_T if row.engine_logprobs_T is None else row.engine_logprobs_T


def reference_logprobs(row: TrainRow) -> Floats:
    """Return the log-probabilities of the reference, or of the sampler if there is no reference."""
    return row.logprobs_T if row.reference_logprobs_T is None else row.reference_logprobs_T


def _refused(what: str, *, code: str) -> BackendError:
    return BackendError(Problem(code=code, what=what, fix="correct the plugin that made the rows"))


def share_rows(rows: Sequence[TrainRow], size: int) -> list[list[int]]:
    """Return the indices of each rank's rows. They depend on the rows only.

    Rows of one prompt are neighbours, since a rank that computes one of them computes the prompt. The largest share is
    as small as that order permits. Rows without an action are left out.
    """
    groups = grouped_rows(rows)
    total = sum(member.last for members in groups for member in members) + 1
    cuts = [[member.number for group in cut for member in group] for cut in _cut_evenly(groups, size, total)]
    return cuts + [[] for _ in range(size - len(cuts))]
