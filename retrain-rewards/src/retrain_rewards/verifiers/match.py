"""The `match` reward, text equal to the reference, and `none`, without a verdict."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from retrain.api import Example, PluginContext, Problem, RewardError, Score
from retrain_rewards.boxed import boxed, last_boxed
from retrain_rewards.tables import RewardTable

_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d+(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?", re.ASCII)  # the minus of 5-3 is no sign


@dataclass(frozen=True, slots=True)
class MatchReward:
    """1.0 when the last box of a completion equals the reference, otherwise 0.0; white space is collapsed.

    A completion without a box scores 0.0. Nothing is normalised beyond white space: `0.5` is not `1/2`. With
    `reads_numbers` the answer is the last number instead, without commas: for models too small to write boxes.
    RewardError on an empty reference: it would make silence correct.
    """

    needs_reference: ClassVar[bool] = True
    reads_numbers: bool = False

    def score(self, example: Example, text: str) -> Score:
        reference = reference_of(example)
        answer = self.answer_in(text)
        wanted = reference.replace(",", "") if self.reads_numbers else reference
        return Score.of(float(answer is not None and collapsed(answer) == wanted))

    def answer_in(self, text: str) -> str | None:
        return last_number(text) if self.reads_numbers else last_boxed(text)

    def gold(self, example: Example) -> str:
        return example.reference if self.reads_numbers else boxed(example.reference)


def make_match(context: PluginContext) -> MatchReward:
    return MatchReward(reads_numbers=context.config.table("reward", RewardTable).answer == "last_number")


def last_number(text: str) -> str | None:
    found = _NUMBER.findall(text)
    return found[-1].replace(",", "") if found else None


def reference_of(example: Example) -> str:
    if not isinstance(example.reference, str):
        what, fix = f"the reference of example {example.id} is {example.reference!r}, not text", "write it as text"
        raise RewardError(Problem(code="reward.reference-not-text", what=what, fix=fix))
    if not (reference := collapsed(example.reference)):
        what = f"example {example.id} has an empty reference: nothing can equal it"
        raise RewardError(Problem(code="reward.no-reference", what=what, fix="leave the example out"))
    return reference


def collapsed(text: str) -> str:
    return " ".join(text.split())


@dataclass(frozen=True, slots=True)
class NoReward:
    """No verdict on any completion, for runs that learn from a teacher; needs no reference and no process."""

    gives_verdicts: ClassVar[bool] = False

    async def score(self, example: Example, text: str) -> Score:
        return Score.no_verdict("reward none judges nothing")


def make_none(context: PluginContext) -> NoReward:
    return NoReward()
