"""Scored groups become rows with credit: the bridge between completions and the credit pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.kernel.contracts.algorithm import PlanningDetector
from retrain.kernel.informative import GroupStatus, group_status
from retrain.kernel.types import Completion, Group, Mask, Outcome, TrainBatch, TrainRow
from retrain.rooms.credit.flow import CreditFlow
from retrain.rooms.credit.pipeline import CreditGroup, CreditResult, assign_credit


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credited:
    """Credit of a step: `judged[g]` are the completions of group g that have a verdict, in the pipeline's order."""

    judged: tuple[tuple[Completion, ...], ...]
    planning: tuple[tuple[Mask, ...], ...]
    statuses: tuple[GroupStatus, ...]
    result: CreditResult
    batch: TrainBatch


def assign(
    groups: Sequence[Group],
    flow: CreditFlow,
    detector: PlanningDetector | None,
    *,
    step: int,
    sepa_lambda: float,
    temperature: float,
) -> Credited:
    """Token advantages for every judged completion, and the batch of rows of the informative groups.

    A completion without a verdict is neither trained nor part of its group's statistics.
    """
    statuses = tuple(group_status(group) for group in groups)
    judged = tuple(_judged(group) for group in groups)
    planning = _planning_masks(judged, detector)
    credit_groups = [
        CreditGroup(
            rewards_G=np.asarray([s.value for s in group.scores if s.outcome is Outcome.SCORED], dtype=np.float64),
            logprobs_G=[completion.logprobs_T[completion.action_T] for completion in completions],
            planning_G=masks,
            entropies_G=_entropies(completions),
            name=f"step {step} group {number} (example {group.example.id})",
        )
        for number, (group, completions, masks) in enumerate(zip(groups, judged, planning, strict=True))
    ]
    trained = [status is GroupStatus.INFORMATIVE for status in statuses]
    result = assign_credit(credit_groups, flow, sepa_lambda=sepa_lambda, trained=trained)
    rows = tuple(
        row
        for completions, advs, is_trained in zip(judged, result.token_advs, trained, strict=True)
        if is_trained
        for completion, advs_T in zip(completions, advs, strict=True)
        for row in _rows(completion, advs_T)
    )
    batch = TrainBatch(step=step, rows=rows, temperature=temperature)
    return Credited(judged=judged, planning=planning, statuses=statuses, result=result, batch=batch)


def _judged(group: Group) -> tuple[Completion, ...]:
    pairs = zip(group.completions, group.scores, strict=True)
    return tuple(completion for completion, score in pairs if score.outcome is Outcome.SCORED)


def _planning_masks(
    judged: Sequence[Sequence[Completion]], detector: PlanningDetector | None
) -> tuple[tuple[Mask, ...], ...]:
    if detector is None:
        return tuple(tuple(np.zeros(c.num_actions, np.bool_) for c in group) for group in judged)
    masks = iter(detector.masks([c.tokens_T[c.action_T] for group in judged for c in group]))
    return tuple(tuple(next(masks) for _ in group) for group in judged)


def _entropies(completions: Sequence[Completion]) -> list[np.ndarray] | None:
    entropies = [c.entropies_T[c.action_T] for c in completions if c.entropies_T is not None]
    return entropies if len(entropies) == len(completions) else None


def _rows(completion: Completion, advs_T: np.ndarray) -> list[TrainRow]:
    """One row for each context that the policy was given: one, unless an episode rewrote its history."""
    advantages_T = np.zeros(len(completion.tokens_T))
    advantages_T[completion.action_T] = advs_T
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
