"""Reads a run's stored completions back as the groups that credit is assigned to."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from retrain.kernel.errors import ConfigError, Problem
from retrain.kernel.types import Mask
from retrain.rooms.credit.episode import named_rewards
from retrain.rooms.credit.flow import CreditFlow
from retrain.rooms.credit.parts import PlanningDetector
from retrain.rooms.credit.pipeline import CreditGroup, CreditResult, assign_credit
from retrain.rooms.session.records.reading import Record, parse_record, parsed_lines, read_steps
from retrain.rooms.session.records.tokens import TokenRecord, read_tokens
from retrain.rooms.text.token_text import token_texts


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredCompletion:
    """One completion: its line of `generations.jsonl` and its tokens."""

    record: Mapping[str, Any]
    tokens: TokenRecord

    @property
    def reward(self) -> float | None:
        """The reward that credit was assigned to; None without a verdict, or when that was dropped."""
        reward: float | None = self.record.get("shaped_reward", self.record["reward"])
        return reward


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StoredStep:
    """A step of a run: its metrics line, and its completions by group."""

    step: int
    metrics: Mapping[str, Any]
    groups: tuple[tuple[StoredCompletion, ...], ...]


def read_step(run: Path, step: int | None) -> StoredStep:
    """A step of a run, the last one by default. Files are streamed."""
    metrics = _metrics_line(run, step)
    chosen = int(metrics["step"])
    tokens = read_tokens(run / "emergence", chosen)
    records = _generation_lines(run / "emergence" / "generations.jsonl", chosen)
    if len(records) != len(tokens):
        what = f"step {chosen} has {len(records)} completions but {len(tokens)} token records"
        raise ConfigError(Problem(where=str(run), what=what, fix="choose another --step"))
    by_group: dict[int, list[StoredCompletion]] = {}
    for record, record_tokens in zip(records, tokens, strict=True):
        by_group.setdefault(record["group"], []).append(StoredCompletion(record=record, tokens=record_tokens))
    return StoredStep(step=chosen, metrics=metrics, groups=tuple(tuple(group) for group in by_group.values()))


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


def _metrics_line(run: Path, step: int | None) -> Mapping[str, Any]:
    file = run / "metrics.jsonl"
    found: Mapping[str, Any] | None = None
    for number, record in read_steps(file):
        if number >= 0 and (step is None or number == step):
            found = record
    if found is None:
        what = "holds no step" if step is None else f"holds no step {step}"
        raise ConfigError(Problem(where=str(file), what=what, fix="choose another --step"))
    return found


def _generation_lines(file: Path, step: int) -> list[Record]:
    mark = f'{{"step": {step},'.encode()  # the first field of each line: only this step's lines are parsed
    lines = parsed_lines(file, lambda line: parse_record(line) if line.startswith(mark) else None)
    return [record for _, record in lines if record is not None]
