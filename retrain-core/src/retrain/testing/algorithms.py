"""What a whole `Algorithm` must do: credit for a step's groups, rows to train, labels, and a state that resumes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from retrain.credit.algorithm import build_algorithm
from retrain.credit.flow import build_flow
from retrain.credit.group_status import group_status
from retrain.credit.pipeline import CreditGroup
from retrain.kernel.contracts.algorithm import Algorithm, Credit
from retrain.kernel.errors import PluginError
from retrain.kernel.informative import GroupStatus
from retrain.kernel.types import Floats, Group
from retrain.testing.bench import Bench
from retrain.testing.check import expect
from retrain.testing.state import expect_plain_metrics, expect_plain_state, expect_same
from retrain.testing.toy_groups import groups, scored_groups

STEPS, RESUME_AT = 6, 3


def build(bench: Bench) -> Algorithm:
    """The algorithm, built as a run builds it."""
    return build_algorithm(build_flow(bench.config, bench.plugins), bench.context())


def token_advantages(algorithm: Algorithm, credit_groups: Sequence[CreditGroup]) -> list[tuple[Floats, ...]]:
    """Advantages of all action tokens of a step, by group and completion."""
    credit = algorithm.assign(0, scored_groups(credit_groups))
    return [tuple(tokens.advantages_A for tokens in tokens_G) for tokens_G in credit.tokens_PG]


def expect_untouched_groups(algorithm: Algorithm) -> None:
    """`assign` does not modify the groups of a step."""
    given, before = scored_groups(groups()), scored_groups(groups())
    algorithm.assign(0, given)
    for group, was in zip(given, before, strict=True):
        for now_T, was_T in zip(_arrays(group), _arrays(was), strict=True):
            expect(
                np.array_equal(now_T, was_T),
                f"the arrays of group {group.example.id!r} have changed after the call",
                why="the same arrays are recorded and trained on after credit is assigned",
                fix="make new arrays in place of writing into those of the completions",
            )


def names_its_condition(bench: Bench) -> None:
    """A whole `Algorithm` has text labels, the condition among them."""
    if not _is_whole(bench):
        return
    try:
        labels = build(bench).labels
    except PluginError as error:
        expect(False, error.problems[0].what, why="`retrain report` compares runs by it", fix=error.problems[0].fix)
        raise
    expect(
        all(isinstance(value, str) for value in labels.values()),
        f"its labels are {dict(labels)!r}",
        why="every line of metrics.jsonl carries them as text",
        fix="give text, and put numbers into Credit.metrics",
    )


def trains_informative_groups(bench: Bench) -> None:
    """A whole `Algorithm` returns rows of informative groups only, with the advantages that it records.

    The last informative group is surplus, as `[training] refill` leaves some: it is not trained.
    """
    if not _is_whole(bench):
        return
    given = scored_groups(groups())
    last = max(number for number, group in enumerate(given) if group_status(group) is GroupStatus.INFORMATIVE)
    given[last] = replace(given[last], is_surplus=True)
    credit = build(bench).assign(0, given)
    statuses = tuple(group_status(group) for group in given)
    expect(
        credit.statuses_P == statuses,
        "it gives groups another status than `group_status` does",
        why="the counts of useful, all-right and all-wrong groups would not be comparable between runs",
        fix="statuses_P=tuple(group_status(group) for group in groups)",
    )
    wanted = _credited(credit, given)
    trained = [row.advantages_T[row.action_T] for row in credit.rows]
    expect(
        len(trained) == len(wanted) and all(np.array_equal(a, b) for a, b in zip(trained, wanted, strict=True)),
        f"{len(trained)} rows do not carry the recorded advantages of the {len(wanted)} completions to train",
        why="the records would show other credit than the policy was trained on",
        fix="build rows with `train_rows(completion, advantages_A)` for every completion of an informative group",
    )
    expect_plain_metrics(credit.metrics, allows_text=True)


def goes_on_after_a_resume(bench: Bench) -> None:
    """A whole `Algorithm` restored from its state, after a JSON round trip, assigns the same credit from there on."""
    if not _is_whole(bench):
        return
    first = build(bench)
    _run(first, 0, RESUME_AT)
    state = expect_plain_state(first)
    resumed = build(bench)
    resumed.restore(state)
    went_on = _run(first, RESUME_AT, STEPS)
    expect_same(went_on, _run(resumed, RESUME_AT, STEPS), what=f"credit and metrics from step {RESUME_AT} on")


def _is_whole(bench: Bench) -> bool:
    return build_flow(bench.config, bench.plugins).is_custom


def _arrays(group: Group) -> list[Any]:
    return [
        array
        for completion in group.completions
        for array in (completion.tokens_T, completion.action_T, completion.logprobs_T, completion.entropies_T)
    ]


def _credited(credit: Credit, given: Sequence[Group]) -> list[Floats]:
    """Recorded advantages of the completions to train, in order."""
    return [
        tokens.advantages_A
        for status, group, tokens_G in zip(credit.statuses_P, given, credit.tokens_PG, strict=True)
        if status is GroupStatus.INFORMATIVE
        for completion, tokens in zip(group.completions, tokens_G, strict=True)
        if completion.num_actions
    ]


def _run(algorithm: Algorithm, start: int, end: int) -> list[Any]:
    seen = []
    for step in range(start, end):
        given = scored_groups(groups()[step : step + 2])
        credit = algorithm.assign(step, given)
        algorithm.observe(step, given, credit)
        advantages = [tokens.advantages_A.tolist() for tokens_G in credit.tokens_PG for tokens in tokens_G]
        seen.append((advantages, dict(credit.metrics)))
    return seen


WHOLE_ALGORITHM = (names_its_condition, trains_informative_groups, goes_on_after_a_resume)
