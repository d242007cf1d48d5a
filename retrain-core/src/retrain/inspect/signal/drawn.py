"""The completions of a run as columns, the cause for which each was trained or not, and the credit of its tokens.

A dozen short fields are needed of a hundred thousand lines of `generations.jsonl`: the bytes before the prompt and
after the reference are cut out of the line and parsed, and only an unusual line is parsed as a whole.
`_N` one entry per completion, in the order of the file; `_A` one per action token of a step, `_T` one per trained one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrain.kernel.errors import ConfigError
from retrain.kernel.types import Floats, GroupStatus, Mask, Outcome, StopReason, status_of
from retrain.records.reading import Record, damaged, number, parse_record, parsed_lines
from retrain.records.record_names import GENERATIONS
from retrain.records.run import Run

Ints = NDArray[np.int64]
_PROMPT, _OUTCOME, _REWARD = b', "prompt": ', b', "outcome": "', b', "reward": '
# Its tokens are text, so nothing after the true one looks like it.
_LAST = b', "top_surprisal_tokens": '
OUTCOMES = tuple(Outcome)
DECILES = 10
STORED = ("lengths", "advantages", "logprobs", "entropies", "planning")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Drawn:
    """Columns of all completions. `rewards_N` are raw and `credited_N` as credit used them, NaN without one.

    `example_N` and `outcome_N` are positions in `examples` and OUTCOMES. `starts_G` are the first completions of the
    groups. `difficulties` exist for the examples that have one.
    """

    examples: tuple[str, ...]
    difficulties: Mapping[str, str]
    step_N: Ints
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
    columns = zip(*rows, strict=True) if rows else ((),) * 10
    step, group, example, tokens, rewards, credited, outcome, truncated, trained, surplus = columns
    step_N, group_N = np.array(step, dtype=np.int64), np.array(group, dtype=np.int64)
    is_first_N = np.ones(step_N.size, dtype=np.bool_)
    is_first_N[1:] = (np.diff(step_N) != 0) | (np.diff(group_N) != 0)
    return Drawn(
        examples=tuple(examples),
        difficulties=difficulties,
        step_N=step_N,
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
    before the true ones, and the last are taken. Keys of `reward_parts` have numbers, and an outcome is a text.
    """
    head, end = line.find(_PROMPT), line.rfind(_LAST)
    outcome = line.rfind(_OUTCOME, 0, end)
    reward = line.rfind(_REWARD, 0, outcome)
    if min(head, end, outcome, reward) < 0 or not line.endswith(b"]}\n"):
        return parse_record(line)
    # json accepts NaN; `_row` refuses it.
    found: Record = json.loads(b"".join((line[:head], line[reward:end], b"}")).decode("utf-8"))
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


# One cause for every sampled token, so that they add up: the first thing that kept a completion out of an optimizer
# step, in the order in which a step decides: its score, its length, its group, the step.


class Cause(StrEnum):
    """The use of tokens, or why they were of none."""

    TAUGHT = "taught"  # in a trained row, with credit that is not zero
    # Masked, or with an advantage of 0: these tokens count in the loss's denominator, but teach nothing.
    ZERO_CREDIT = "trained, zero credit"
    # Without a token file the two causes above cannot be distinguished.
    TRAINED = "trained, credit not stored"
    ALL_RIGHT = "group all right"
    ALL_WRONG = "group all wrong"
    # Equal scores strictly between 0 and 1.
    TIED = "group all same"
    # An advantage compares completions of a group, so a single verdict teaches nothing.
    TOO_FEW = "group with one verdict"
    TRUNCATED = "truncated"  # left out by [training] overlong
    NO_VERDICT = "no verdict"
    FAILED = "verifier failed"
    SURPLUS = "surplus of refill"
    REJECTED = "step rejected"
    NO_UPDATE = "control no_update"
    # Informative, but the records do not say why it was left out.
    OTHER = "not trained"
    # The step's line counts these tokens, but their completions are not stored.
    UNRECORDED = "no record"
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


# The credit of trained tokens. |A| is the weight of a token's log-probability in the loss, all other things equal, and
# |A| (1 - p) the size of the gradient at that token's logit, under the policy that sampled it. Neither is the gradient
# of the parameters: tokens add up and cancel there, and clipping, importance weights and a loss by sequences change
# their weights.


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Some tokens of trained rows: their number, sum of |A|, and sum of |A| (1 - p)."""

    tokens: int = 0
    credit: float = 0.0
    pull: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditShares:
    """Credit of all trained tokens whose step has a token file.

    `is_known_N`, `zero_tokens_N` and `credit_N`: whether a completion's tokens are stored, the number of them with zero
    credit, and their sum of |A|. `surprisal` and `entropy` are tenths of the tokens of each step, the most uncertain
    first; `entropy` is empty where the sampler gave none. `planning` is None without a detector.
    """

    is_known_N: Mask
    zero_tokens_N: Ints
    credit_N: Floats
    total: Share
    surprisal: tuple[Share, ...]
    entropy: tuple[Share, ...]
    planning: Share | None
    notes: tuple[str, ...]


def read_credit(run: Run, drawn: Drawn) -> CreditShares:
    """Read the credit of a run, one step's token file after another; a note where files are missing or do not fit."""
    size = drawn.step_N.size
    is_known_N, zero_N, credit_N = np.zeros(size, np.bool_), np.zeros(size, np.int64), np.zeros(size)
    sums = {name: np.zeros((DECILES, 3)) for name in ("surprisal", "entropy")} | {"planning": np.zeros((2, 3))}
    is_whole, missing = dict.fromkeys(sums, True), 0
    # The sentinels add the end of the last step; without completions there is no start at all.
    starts = np.flatnonzero(np.diff(drawn.step_N, prepend=-1, append=-1)).tolist()
    for start, stop in pairwise(starts):
        arrays = _arrays(run, int(drawn.step_N[start]), drawn.tokens_N[start:stop])
        if arrays is None:
            missing += 1
            continue
        lengths, credit_A = arrays["lengths"], np.abs(arrays["advantages"])
        owner_A = np.repeat(np.arange(stop - start), lengths)
        is_known_N[start:stop] = True
        zero_N[start:stop] = np.bincount(owner_A[credit_A == 0.0], minlength=stop - start)
        credit_N[start:stop] = np.bincount(owner_A, weights=credit_A, minlength=stop - start)
        is_trained_A = drawn.is_trained_N[start:stop][owner_A]
        # Half-precision samplers report log-probabilities slightly above 0.
        logprobs_T, credit_T = np.minimum(arrays["logprobs"][is_trained_A], 0.0), credit_A[is_trained_A]
        columns = (np.ones_like(credit_T), credit_T, -credit_T * np.expm1(logprobs_T))
        for name, stored in (("surprisal", "logprobs"), ("entropy", "entropies"), ("planning", "planning")):
            if stored not in arrays:
                is_whole[name] = False
                continue
            values_T = logprobs_T if name == "surprisal" else arrays[stored][is_trained_A]
            sums[name] += _by_mark(values_T, columns) if name == "planning" else _by_tenth(np.abs(values_T), columns)
    note = f"{missing:,} of {len(starts) - 1:,} steps have no token file that fits: their credit"
    is_whole = {name: whole and bool(is_known_N.any()) for name, whole in is_whole.items()}
    return CreditShares(
        is_known_N=is_known_N,
        zero_tokens_N=zero_N,
        credit_N=credit_N,
        total=_share(sums["surprisal"].sum(axis=0)),
        surprisal=tuple(map(_share, sums["surprisal"])),
        entropy=tuple(map(_share, sums["entropy"])) if is_whole["entropy"] else (),
        planning=_share(sums["planning"][1]) if is_whole["planning"] else None,
        notes=(note,) if missing else (),
    )


def _arrays(run: Run, step: int, lengths_N: Ints) -> Mapping[str, np.ndarray] | None:
    try:
        arrays = run.token_arrays(step, STORED)
        if arrays is None:
            return None
        flat = [arrays[name] for name in arrays if name != "lengths"]
        fits = np.array_equal(arrays["lengths"], lengths_N) and {*map(len, flat)} == {int(lengths_N.sum())}
        fits = fits and bool(np.isfinite(arrays["advantages"]).all() and np.isfinite(arrays["logprobs"]).all())
        return arrays if fits else None
    except (ConfigError, KeyError):
        return None


def _by_tenth(uncertainty_T: np.ndarray, columns: Sequence[np.ndarray]) -> Floats:
    """Sum the columns by tenths of the tokens, the most uncertain first; ties in the order of the file.

    One sort of (bits of the float, place) as whole numbers takes half the time of a stable one of floats.
    """
    size = uncertainty_T.size
    # Non-negative floats have the same order as their bits read as whole numbers (IEEE 754).
    bits_T = uncertainty_T.astype(np.float32).view(np.uint32)
    keys_T = (~bits_T).astype(np.uint64) << np.uint64(32) | np.arange(size, dtype=np.uint64)
    keys_T.sort()
    order = (keys_T & np.uint64(0xFFFFFFFF)).astype(np.int64)
    cuts = np.arange(DECILES + 1) * size // DECILES
    summed = [np.concatenate([np.zeros(1), np.cumsum(values_T[order], dtype=np.float64)])[cuts] for values_T in columns]
    return np.diff(np.stack(summed, axis=1), axis=0)


def _by_mark(is_marked_T: np.ndarray, columns: Sequence[np.ndarray]) -> Floats:
    marks_T = is_marked_T.astype(np.bool_)
    return np.array([[values_T[each].sum(dtype=np.float64) for values_T in columns] for each in (~marks_T, marks_T)])


def _share(sums_3: Floats) -> Share:
    return Share(tokens=int(sums_3[0]), credit=float(sums_3[1]), pull=float(sums_3[2]))
