"""Three outcomes that are never merged, and a run that stops when the verifier is what is broken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from retrain.errors import RewardError
from retrain.loop.scoring.inline import score_completion, score_groups
from retrain.types import Completion, Example, Outcome, Score

EXAMPLE = Example(id="e", prompt="p", reference="r")


class Answers:
    """A reward that answers, or raises, what it is told to, in turn."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, str]] = []

    def score(self, example: Example, text: str) -> Any:
        self.asked.append((example.id, text))
        answer = self.answers[(len(self.asked) - 1) % len(self.answers)]
        if isinstance(answer, BaseException):
            raise answer
        return answer


@pytest.mark.parametrize("answer", [1, 0.5, True, np.float32(1.0), Score.of(0.25)])
def test_a_number_is_a_score(answer: Any) -> None:
    score = score_completion(Answers(answer), EXAMPLE, "x")
    assert score.outcome is Outcome.SCORED
    assert isinstance(score.value, float)


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        (float("nan"), "finite number"),
        (float("inf"), "finite number"),
        (None, "TypeError"),
        ("right", "ValueError"),
        ([1.0, 0.0], "TypeError"),
        (ValueError("no parse"), "ValueError: no parse"),
        (RecursionError("deep"), "RecursionError: deep"),
        (MemoryError(), "MemoryError"),
    ],
)
def test_whatever_else_a_verifier_does_is_a_failure(answer: Any, detail: str) -> None:
    score = score_completion(Answers(answer), EXAMPLE, "x")
    assert (score.outcome, score.value) == (Outcome.FAILED, None)
    assert detail in score.detail


def test_an_interrupt_is_no_failure_of_the_verifier() -> None:
    with pytest.raises(KeyboardInterrupt):
        score_completion(Answers(KeyboardInterrupt()), EXAMPLE, "x")


def test_no_verdict_is_kept_as_it_is() -> None:
    assert score_completion(Answers(Score.no_verdict("why")), EXAMPLE, "x").outcome is Outcome.NO_VERDICT


def test_every_completion_is_asked_once_with_its_own_example(make_completion: Callable[..., Completion]) -> None:
    reward = Answers(1.0, 0.0)
    examples = [Example(id=name, prompt="p", reference="r") for name in "ab"]
    groups = [[make_completion(text=f"{name}{i}") for i in range(2)] for name in "ab"]
    scores = score_groups(reward, examples, groups)
    assert reward.asked == [("a", "a0"), ("a", "a1"), ("b", "b0"), ("b", "b1")]
    assert [[score.value for score in group] for group in scores] == [[1.0, 0.0], [1.0, 0.0]]


@pytest.mark.parametrize(("failures", "stops"), [(0, False), (2, False), (3, True), (20, True)])
def test_more_than_a_tenth_of_failures_stops_the_run(
    failures: int, stops: bool, make_completion: Callable[..., Completion]
) -> None:
    reward = Answers(*[ValueError("broken")] * failures, *[1.0] * (20 - failures))
    groups = [[make_completion() for _ in range(10)] for _ in range(2)]
    if not stops:
        flat = [score for group in score_groups(reward, [EXAMPLE] * 2, groups) for score in group]
        assert sum(score.outcome is Outcome.FAILED for score in flat) == failures
        return
    with pytest.raises(RewardError, match=f"failed on {failures} of 20 completions; first: ValueError: broken"):
        score_groups(reward, [EXAMPLE] * 2, groups)


def test_no_verdicts_never_stop_the_run(make_completion: Callable[..., Completion]) -> None:
    scores = score_groups(Answers(Score.no_verdict("x")), [EXAMPLE], [[make_completion()] * 8])
    assert {score.outcome for score in scores[0]} == {Outcome.NO_VERDICT}
