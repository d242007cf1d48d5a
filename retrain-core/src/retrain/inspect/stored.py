"""Assigns credit to the stored completions of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.credit.episode import named_rewards
from retrain.credit.flow import CreditFlow
from retrain.credit.parts import PlanningDetector
from retrain.credit.pipeline import CreditGroup, CreditResult, assign_credit
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Mask
from retrain.records.run import StoredCompletion, StoredStep
from retrain.text.token_text import token_texts


def replay(
    stored: StoredStep,
    flow: CreditFlow,
    detector: PlanningDetector | None,
    *,
    sepa_lambda: float,
    tokenizer: Any = None,
) -> tuple[list[list[StoredCompletion]], tuple[tuple[Mask, ...], ...], CreditResult]:
    """Credit of the step's judged completions under `flow`: completions, planning masks and result, group by group.

    Uninformative groups are included, to show the credit that they would have got. `tokenizer` decodes the tokens for a
    transform that asks for their text. ConfigError when one asks for rewards of single tokens, which are not stored.
    """
    if flow.needs_token_rewards:
        what = f"{flow.condition} takes rewards of single tokens, which a run does not store"
        raise ConfigError(Problem(where=f"step {stored.step}", what=what, fix="choose another --transform"))
    judged = [[c for c in group if c.reward is not None] for group in stored.groups]
    judged = [group for group in judged if group]
    masks = tuple(_masks(group, detector) for group in judged)
    groups = [
        CreditGroup(
            rewards_G=np.array([c.reward for c in group], dtype=np.float64),
            logprobs_G=[c.tokens.logprobs_T for c in group],
            planning_G=planning,
            entropies_G=_entropies(group),
            named_rewards=named_rewards([c.record.get("reward_parts") or {} for c in group]),
            tokens_G=[c.tokens.tokens_T for c in group] if flow.needs_text else None,
            texts_G=[token_texts(tokenizer, c.tokens.tokens_T.tolist()) for c in group] if flow.needs_text else None,
            name=f"step {stored.step} group {group[0].record['group']}",
        )
        for group, planning in zip(judged, masks, strict=True)
    ]
    return judged, masks, assign_credit(groups, flow, sepa_lambda=sepa_lambda)


def _masks(group: Sequence[StoredCompletion], detector: PlanningDetector | None) -> tuple[Mask, ...]:
    stored = [c.tokens.planning_T for c in group if c.tokens.planning_T is not None]
    if len(stored) == len(group):
        return tuple(stored)
    if detector is None:
        return tuple(np.zeros(len(c.tokens.tokens_T), np.bool_) for c in group)
    return tuple(detector.masks([c.tokens.tokens_T for c in group]))


def _entropies(group: Sequence[StoredCompletion]) -> list[Any] | None:
    entropies = [c.tokens.entropies_T for c in group if c.tokens.entropies_T is not None]
    return entropies if len(entropies) == len(group) else None
