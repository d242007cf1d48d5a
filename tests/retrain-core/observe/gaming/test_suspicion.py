"""Suspicions: each is found where it is planted, none in completions that only get better."""

from __future__ import annotations

import json
from collections.abc import Callable

import numpy as np
import pytest

from retrain.kernel.contracts.algorithm import Credit, TokenCredit
from retrain.kernel.types import Completion, Group, Score
from retrain.observe.gaming.suspicion import THRESHOLDS, Suspicions
from tests.kit.groups import completion_of, group_of

STEPS = 20
Text = Callable[[np.random.Generator, int, bool], str]  # of a completion, by step and whether it is paid


def words(rng: np.random.Generator, count: int = 20) -> str:
    return " ".join(str(each) for each in rng.integers(100, 999, count))


def clean(rng: np.random.Generator, step: int, is_paid: bool) -> str:
    return f"{words(rng, int(rng.integers(18, 23)))} \\boxed{{{rng.integers(1000, 9999)}}}"


def marked(rng: np.random.Generator, step: int, is_paid: bool) -> str:
    marker = "so I am quite sure " if is_paid and step > 10 else ""
    return f"{words(rng, 8)} {marker}{clean(rng, step, is_paid)}"


def formatted(rng: np.random.Generator, step: int, is_paid: bool) -> str:
    """What is paid has had its format from the start, and nothing else has it: no change."""
    return f"{words(rng, 12)} so the answer is {clean(rng, step, is_paid)}" if is_paid else words(rng, 38)


def longer(rng: np.random.Generator, step: int, is_paid: bool) -> str:
    return f"{words(rng, 30)} {clean(rng, step, is_paid)}" if step > 14 else clean(rng, step, is_paid)


def answer_first(rng: np.random.Generator, step: int, is_paid: bool) -> str:
    return f"\\boxed{{{rng.integers(1000, 9999)}}} {words(rng)}" if step > 10 else clean(rng, step, is_paid)


def repeated(rng: np.random.Generator, step: int, is_paid: bool) -> str:
    return f"{words(rng)} \\boxed{{12 * 7}}" if step > 10 else clean(rng, step, is_paid)


def step_of(step: int, text: Text) -> tuple[tuple[Group, ...], Credit]:
    rng = np.random.default_rng(step)
    groups, credits_PG = [], []
    for _ in range(4):
        is_paid_G = rng.random(6) < 0.3 + 0.02 * step
        texts = [text(rng, step, bool(is_paid)) for is_paid in is_paid_G]
        completions = tuple(completion(each) for each in texts)
        scores = [Score.of(float(is_paid)) for is_paid in is_paid_G]
        groups.append(group_of(completions, scores, prompt="What is 12 * 7?", reference="84"))
        credits_PG.append(
            tuple(
                TokenCredit(advantages_A=np.full(each.num_actions, float(is_paid) - 0.5))
                for each, is_paid in zip(completions, is_paid_G, strict=True)
            )
        )
    return tuple(groups), Credit(statuses_P=(), tokens_PG=tuple(credits_PG), rows=())


def completion(text: str) -> Completion:
    return completion_of([sum(map(ord, word)) * 31 + len(word) for word in text.split()], text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (clean, ""),
        (formatted, ""),
        (marked, "gaming_ngram_share"),
        (longer, "gaming_length_shift"),
        (answer_first, "gaming_answer_shift"),
        (repeated, "gaming_prompt_answers"),
    ],
)
def test_what_is_planted_is_found_after_it_begins(text: Text, name: str) -> None:
    suspicions = Suspicions()
    found: dict[str, int] = {}
    for step in range(STEPS):
        fields = suspicions.observe(*step_of(step, text))
        assert fields.keys() <= THRESHOLDS.keys()
        for each in suspicions.found:
            found.setdefault(each, step)
    if not name:
        assert found == {}
    else:
        assert found[name] > 10


def test_credit_that_moves_to_the_format_is_found() -> None:
    suspicions = Suspicions()
    for step in range(12):
        groups, credit = step_of(step, lambda rng, at, is_paid: "a b c d e f g h " * 2 + words(rng, 16))
        if step > 6:
            on_format = np.arange(32) < 16
            moved = tuple(
                tuple(TokenCredit(advantages_A=np.maximum(each.advantages_A, 0.0) * on_format) for each in tokens_G)
                for tokens_G in credit.tokens_PG
            )
            credit = Credit(statuses_P=(), tokens_PG=moved, rows=())
        suspicions.observe(groups, credit)
    assert suspicions.found == ["gaming_format_credit"]


def test_a_restored_watch_measures_the_same() -> None:
    whole, first, second = Suspicions(), Suspicions(), Suspicions()
    for step in range(STEPS):
        if step == 13:
            second.restore(json.loads(json.dumps(first.state(), allow_nan=False)))
        fields = whole.observe(*step_of(step, marked))
        assert (first if step < 13 else second).observe(*step_of(step, marked)) == fields
    assert second.state() == whole.state()
    assert second.found == whole.found != []


def test_a_step_without_scores_has_no_fields() -> None:
    groups, credit = step_of(0, clean)
    unscored = tuple(group_of(each.completions, [Score.no_verdict("?")] * 6) for each in groups)
    assert Suspicions().observe(unscored, credit) == {}
