"""The scored groups of a step as credit was assigned to them, from the run's records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Completion, Example, Floats, Group, Outcome, Score, StopReason
from retrain.records.run import StoredCompletion, StoredStep

OLD = "its records hold no prompts' tokens, which earlier versions did not write"


def groups_of(stored: StoredStep, *, correct_above: float) -> tuple[Group, ...]:
    """The groups; ConfigError when the records lack what credit or training needs.

    What a run does not store is empty: an example's `task` and `info`, and the part of a score that a shaper changed.
    """
    return tuple(_group(stored.step, members, correct_above) for members in stored.groups)


def check_credit(stored: StoredStep, credit: Credit) -> None:
    """ConfigError unless this is the stored credit, every token of it as float32."""
    tokens = [tokens for group in credit.tokens_PG for tokens in group]
    members = [completion for group in stored.groups for completion in group]
    for found, member in zip(tokens, members, strict=True):
        was_A, is_A = member.tokens.advantages_T.astype(np.float32), found.advantages_A.astype(np.float32)
        different = np.flatnonzero(was_A != is_A)
        if len(different):
            record, at = member.record, int(different[0])
            what = (
                f"credit of group {record['group']}, completion {record['index']}, token {at} comes out as "
                f"{is_A[at]:.9g} and was {was_A[at]:.9g}"
            )
            why = "a plugin of credit has changed since, or reads what a run does not store"
            fix = "replay with the code that ran, see `inputs/` of the run"
            raise ConfigError(Problem(where=f"step {stored.step}", what=what, why=why, fix=fix))


def _group(step: int, members: Sequence[StoredCompletion], correct_above: float) -> Group:
    record = members[0].record
    scores = [_scores(member.record) for member in members]
    return Group(
        example=Example(id=record["example_id"], prompt=record["prompt"], reference=record["reference"]),
        completions=tuple(_completion(step, member) for member in members),
        scores=tuple(shaped for _, shaped in scores),
        raw_scores=tuple(raw for raw, _ in scores),
        correct_above=correct_above,
        round=int(record.get("round", 0)),
        is_surplus=bool(record.get("surplus", False)),
    )


def _scores(record: Mapping[str, Any]) -> tuple[Score, Score]:
    """The raw score, and the one that credit was assigned to."""
    raw = Score(
        outcome=Outcome(record["outcome"]),
        value=record["reward"],
        detail=record.get("detail", ""),
        parts=record.get("reward_parts") or {},
    )
    if "shaped_reward" not in record:
        return raw, raw
    value = record["shaped_reward"]
    if value is None:
        return raw, Score.no_verdict("left out before credit was assigned")
    return raw, Score(outcome=Outcome.SCORED, value=value, parts=raw.parts)


def _completion(step: int, member: StoredCompletion) -> Completion:
    record, tokens = member.record, member.tokens
    if tokens.row is None:
        raise ConfigError(Problem(where=f"step {step}", what=OLD, fix="replay a run of this version"))
    row = tokens.row

    def spread(values_A: Floats | None) -> Floats | None:
        if values_A is None:
            return None
        values_T = np.zeros(len(row.tokens_T))
        values_T[row.action_T] = values_A
        return values_T

    logprobs_T = spread(tokens.logprobs_T)
    assert logprobs_T is not None, "every record has them"
    return Completion(
        tokens_T=row.tokens_T,
        action_T=row.action_T,
        logprobs_T=logprobs_T,
        text=record["completion"],
        stop_reason=StopReason(record["stop_reason"]),
        policy_version=int(record["policy_version"]),
        entropies_T=spread(tokens.entropies_T),
        engine_logprobs_T=spread(tokens.engine_logprobs_T),
        rewards_T=spread(tokens.rewards_T),
        starts=row.starts,
        turns=int(record.get("turns", 1)),
        reference_logprobs_T=spread(tokens.reference_logprobs_T),
        kl_coef=tokens.kl_coef,
    )
