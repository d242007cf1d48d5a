"""The completions of a run as columns, read from `generations.jsonl` without its texts.

A dozen short fields are needed of a hundred thousand lines: the bytes before the prompt and after the reference are cut
out of the line and parsed, and only an unusual line is parsed as a whole.
`_N` one entry per completion, in the order of the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.kernel.types import Floats, GroupStatus, Mask, Outcome, StopReason, status_of
from retrain.records.reading import Record, damaged, number, parse_record, parsed_lines
from retrain.records.record_names import GENERATIONS
from retrain.records.run import Run

Ints = NDArray[np.int64]
_PROMPT, _OUTCOME, _REWARD = b', "prompt": ', b', "outcome": "', b', "reward": '
_LAST = b', "top_surprisal_tokens": '  # its tokens are text, so nothing after the true one looks like it
OUTCOMES = tuple(Outcome)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Columns of all completions. `rewards_N` are raw and `credited_N` those of credit, NaN without one.

    `example_N` and `outcome_N` are positions in `examples` and OUTCOMES. `starts_G` are the first completions of the
    groups. `difficulties` are those of the examples that have one.
    """

    examples: tuple[str, ...]
    difficulties: Mapping[str, str]
    step_N: Ints
    group_N: Ints
    example_N: Ints
    tokens_N: Ints
    rewards_N: Floats
    credited_N: Floats
    outcome_N: Ints
    is_truncated_N: Mask
    is_trained_N: Mask
    is_surplus_N: Mask
    starts_G: Ints

    def groups(self) -> Iterator[slice]:
        starts = [*self.starts_G.tolist(), self.step_N.size]
        return map(slice, starts[:-1], starts[1:])


def read_drawn(run: Run) -> Drawn:
    """Read the completions of a run; none without such a file. ConfigError names the first damaged line."""
    file = run.folder / GENERATIONS
    rows, examples, difficulties = list[tuple[Any, ...]](), dict[str, int](), dict[str, str]()
    for line, record in parsed_lines(file, _fields) if run.has(GENERATIONS) else ():
        try:
            rows.append(_row(record, examples))
        except (KeyError, TypeError, ValueError) as error:
            raise damaged(f"{file}:{line}", f"not the record of a completion: {error!r}") from error
        if "difficulty" in record:
            difficulties[record["example_id"]] = str(record["difficulty"])
    return _columns(rows, tuple(examples), difficulties)


def _columns(rows: list[tuple[Any, ...]], examples: tuple[str, ...], difficulties: Mapping[str, str]) -> Drawn:
    columns = zip(*rows, strict=True) if rows else ((),) * 10
    step, group, example, tokens, rewards, credited, outcome, truncated, trained, surplus = columns
    step_N, group_N = np.array(step, dtype=np.int64), np.array(group, dtype=np.int64)
    is_first_N = np.ones(step_N.size, dtype=np.bool_)
    is_first_N[1:] = (np.diff(step_N) != 0) | (np.diff(group_N) != 0)
    return Drawn(
        examples=examples,
        difficulties=difficulties,
        step_N=step_N,
        group_N=group_N,
        example_N=np.array(example, dtype=np.int64),
        tokens_N=np.array(tokens, dtype=np.int64),
        rewards_N=np.array(rewards, dtype=np.float64),
        credited_N=np.array(credited, dtype=np.float64),
        outcome_N=np.array(outcome, dtype=np.int64),
        is_truncated_N=np.array(truncated, dtype=np.bool_),
        is_trained_N=np.array(trained, dtype=np.bool_),
        is_surplus_N=np.array(surplus, dtype=np.bool_),
        starts_G=np.flatnonzero(is_first_N),
    )


def _fields(line: bytes) -> Record:
    """Return the fields of a line but for its texts.

    A quotation mark inside of a text is escaped, so a needle with a bare one is never found there. Keys of a chat come
    before the true ones, and the last are taken; those of `reward_parts` have numbers, and an outcome is a text.
    """
    head, end = line.find(_PROMPT), line.rfind(_LAST)
    outcome = line.rfind(_OUTCOME, 0, end)
    reward = line.rfind(_REWARD, 0, outcome)
    if min(head, end, outcome, reward) < 0 or not line.endswith(b"]}\n"):
        return parse_record(line)
    found: Record = json.loads(b"".join((line[:head], line[reward:end], b"}")).decode("utf-8"))  # `_row` refuses NaN
    return found


def _row(record: Record, examples: dict[str, int]) -> tuple[Any, ...]:
    reward = _value(record["reward"])
    return (
        _whole(record["step"]),
        _whole(record["group"]),
        examples.setdefault(record["example_id"], len(examples)),
        _whole(record["num_tokens"]),
        reward,
        _value(record["shaped_reward"]) if "shaped_reward" in record else reward,
        OUTCOMES.index(Outcome(record["outcome"])),
        record["stop_reason"] == StopReason.LENGTH,
        record["trained"] is True,
        record.get("surplus") is True,
    )


def _value(value: object) -> float:
    if value is None:
        return math.nan
    if (found := number(value)) is None:
        raise ValueError(f"{value!r} is no reward")
    return float(found)


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


# What became of every token that a run drew: one cause for each, so that they add up.
#
# The cause is the first thing that kept a completion out of an optimizer step, in the order in which a step decides:
# its own score, its length, its group, then what befell the step.


class Cause(StrEnum):
    """The use of tokens, or why they were of none."""

    TAUGHT = "taught"  # in a trained row, with credit that is not zero
    ZERO_CREDIT = "trained, zero credit"  # in a trained row: masked, or an advantage of 0; in the loss's denominator
    TRAINED = "trained, credit not stored"  # in a trained row of a step without a token file
    ALL_RIGHT = "group all right"
    ALL_WRONG = "group all wrong"
    TIED = "group all same"  # equal scores strictly between 0 and 1
    TOO_FEW = "group with one verdict"  # judged, but nothing in its group to compare with
    TRUNCATED = "truncated"  # left out by [training] overlong
    NO_VERDICT = "no verdict"
    FAILED = "verifier failed"
    SURPLUS = "surplus of refill"
    REJECTED = "step rejected"
    NO_UPDATE = "control no_update"
    OTHER = "not trained"  # informative, and the records do not say why it was left out
    UNRECORDED = "no record"  # counted by the step's line, and no completion of the step is stored
    EVALUATION = "evaluation"


_OF_STATUS = {
    GroupStatus.ALL_RIGHT: Cause.ALL_RIGHT,
    GroupStatus.ALL_WRONG: Cause.ALL_WRONG,
    GroupStatus.TIED: Cause.TIED,
    GroupStatus.NO_VERDICT: Cause.TOO_FEW,
}
_OF_OUTCOME = {Outcome.NO_VERDICT: Cause.NO_VERDICT, Outcome.FAILED: Cause.FAILED}
CAUSES = tuple(Cause)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Facts from configuration and steps' lines that completions do not have.

    `sampled_tokens` by step, None where it was rejected while it was sampled; the steps `rejected` before their first
    update; `is_no_update`, and `leaves_truncated` by [training] overlong.
    """

    sampled_tokens: Mapping[int, int | None] = field(default_factory=dict)
    rejected: frozenset[int] = frozenset()
    is_no_update: bool = False
    leaves_truncated: bool = False


def causes_of(drawn: Drawn, facts: RunFacts) -> tuple[np.ndarray, np.ndarray]:
    """Return the cause of each completion as a position in CAUSES (TRAINED for all that were); which groups can teach.

    A group can teach when its raw rewards differ, truncated and dropped ones aside: INFORMATIVE, or surplus.
    """
    cause_N = np.full(drawn.step_N.size, CAUSES.index(Cause.TRAINED))
    teaches_G = np.zeros(drawn.starts_G.size, dtype=np.bool_)
    values_N = np.where(np.isnan(drawn.credited_N), np.nan, drawn.rewards_N)
    for place, group in enumerate(drawn.groups()):
        values_G = values_N[group]
        status = status_of(values_G[~np.isnan(values_G)].tolist())
        teaches_G[place] = status is GroupStatus.INFORMATIVE
        is_trained_G = drawn.is_trained_N[group]
        if is_trained_G.all():
            continue
        reason = None if is_trained_G.any() else _OF_STATUS.get(status)
        for at in (group.start + np.flatnonzero(~is_trained_G)).tolist():
            cause_N[at] = CAUSES.index(_cause(drawn, at, reason, facts))
    return cause_N, teaches_G


def _cause(drawn: Drawn, at: int, of_group: Cause | None, facts: RunFacts) -> Cause:
    """Return why a completion was not trained; `of_group` is the reason why none of its group was, if there is one."""
    outcome = OUTCOMES[drawn.outcome_N[at]]
    if outcome in _OF_OUTCOME:
        return _OF_OUTCOME[outcome]
    if np.isnan(drawn.credited_N[at]):
        return Cause.TRUNCATED
    if of_group:
        return of_group
    if drawn.is_surplus_N[at]:
        return Cause.SURPLUS
    if facts.leaves_truncated and drawn.is_truncated_N[at]:
        return Cause.TRUNCATED
    if facts.is_no_update:
        return Cause.NO_UPDATE
    return Cause.REJECTED if int(drawn.step_N[at]) in facts.rejected else Cause.OTHER
