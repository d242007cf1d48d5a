"""The suite of rewards: score any text, in a scoring process, and reproduce the scores."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

from retrain.kernel.config.schema import ScoringTable
from retrain.kernel.types import Example, Outcome, Score
from retrain.records.reading import number
from retrain.tasks.scoring.pool import NamedReward
from retrain.tasks.scoring.service import ScoringService
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_unchanged, fail
from retrain.testing.toys import HOSTILE, as_text, examples_for

ANSWERS = ("42", r"The answer is \boxed{42}.", "Paris", r"\boxed{\frac{1}{6}}", "I do not know.")
Pairs = Sequence[tuple[Example, str]]


def can_score(bench: Bench) -> None:
    """It has `score(example, text)`, a function or a coroutine, of two arguments."""
    reward = bench.build()
    score = getattr(reward, "score", None)
    expect(
        callable(score),
        f"the {type(reward).__name__} that the factory returned has no method score",
        why="a run calls reward.score(example, text) for every completion",
        fix="let the factory return an object with score(self, example, text)",
    )
    try:
        inspect.signature(score).bind(None, "")  # type: ignore[arg-type]
    except TypeError as error:
        why, fix = "a run passes exactly these two", "make it score(self, example, text)"
        fail(f"score cannot be called as score(example, text): {error}", why=why, fix=fix)


def works_in_the_process_of_a_run(bench: Bench) -> None:
    """It can be sent to a scoring process, set up there, and called."""
    example = examples_for(bench)[0]
    expect_sound(bench, bench.build(), [(example, answer) for answer in ANSWERS])


def survives_hostile_texts(bench: Bench) -> None:
    """Any text gets a score or no verdict: nothing raises, hangs or returns a non-finite number."""
    example = examples_for(bench)[0]
    expect_sound(bench, bench.build(), [(example, text) for text in HOSTILE.values()], names=list(HOSTILE))


def calls_its_gold_right(bench: Bench) -> None:
    """The completion that `gold` returns for an example, if any, scores 1."""
    expect_gold(bench, bench.build(), examples_for(bench))


def repeats_its_scores(bench: Bench) -> None:
    """The same text gets the same score again, and in another process."""
    pairs = [(example, answer) for example in examples_for(bench) for answer in ANSWERS]
    # A repetition shows memory of earlier calls; a second process shows results that differ by process (hash()).
    first = scores_of(bench, bench.build(), [*pairs, *pairs])
    again = scores_of(bench, bench.build(), pairs)
    for (_, text), one, two, three in zip(pairs, first, first[len(pairs) :], again, strict=False):
        shown = [_shown(score) for score in (one, two, three)]
        expect(
            len(set(shown)) == 1,
            f"{text!r} got {shown[0]}, then {shown[1]}, and {shown[2]} in another process",
            why="equal completions are scored once and the score is kept; a resumed run must find the same rewards",
            fix="remove randomness, clocks and memory of earlier calls from the reward",
        )


def leaves_examples_alone(bench: Bench) -> None:
    """It does not modify the example."""
    examples = examples_for(bench)
    before = as_text(examples)
    scores_of(bench, bench.build(), [(example, answer) for example in examples for answer in ANSWERS])
    why = "the same example is scored for every completion of its group, and recorded"
    expect_unchanged(as_text(examples) == before, "an example", why=why)


def reports_finite_metrics(bench: Bench) -> None:
    """`metrics`, if it exists, returns finite numbers for the step's line."""
    reward = bench.build()
    if not inspect.iscoroutinefunction(reward.score) or not hasattr(reward, "metrics"):
        return
    scores_of(bench, reward, [(examples_for(bench)[0], ANSWERS[0])])
    for name, value in reward.metrics().items():
        why = "the fields of metrics.jsonl are finite numbers; a run omits all of yours if one is not"
        fix = "omit a field that has no value yet"
        expect(number(value) is not None, f"metrics() returned {name} = {value!r}", why=why, fix=fix)


def scores_of(bench: Bench, reward: Any, pairs: Pairs) -> list[Score]:
    """Return scores from a run's scoring service: in another process, or in an event loop for a coroutine."""
    # A retry would hide a reward that fails at times, and the cache a score that changes.
    settings: ScoringTable = bench.config.scoring.model_copy(update={"workers": 1, "retries": 0, "cache": False})
    service = ScoringService([NamedReward(name=bench.name, reward=reward)], settings)
    try:
        with service.batch("conformance", fresh=True) as batch:
            for example, text in pairs:
                batch.submit(example, text)
            return list(batch.collect(within_budget=False))
    finally:
        service.close()


def expect_sound(bench: Bench, reward: Any, pairs: Pairs, names: Sequence[str] = ()) -> None:
    for place, score in enumerate(scores_of(bench, reward, pairs)):
        shown = names[place] if names else repr(pairs[place][1])
        why = "a failed score leaves the completion out, and a run stops when too many fail"
        fix = "return 0.0 for a wrong answer, Score.no_verdict(reason) when it cannot be decided"
        expect(score.outcome is not Outcome.FAILED, f"scoring {shown} failed: {score.detail}", why=why, fix=fix)


def expect_gold(bench: Bench, reward: Any, examples: Sequence[Example]) -> None:
    gold = getattr(reward, "gold", None)
    if gold is None:
        return
    answers = [(example, gold(example)) for example in examples]
    for example, answer in answers:
        expect(
            answer is None or isinstance(answer, str),
            f"gold() of example {example.id!r} is {type(answer).__name__}",
            why="the audit before training scores that text",
            fix="return text, or None when there is no right answer to give",
        )
    pairs = [(example, answer) for example, answer in answers if answer is not None]
    for (example, answer), score in zip(pairs, scores_of(bench, reward, pairs), strict=True):
        expect(
            score.value is not None and math.isclose(score.value, 1.0),
            f"gold() of example {example.id!r} is {answer[:200]!r}, but scores {_shown(score)}",
            why="the audit before training refuses a reward that scores its own right answer as wrong",
            fix="let gold and score agree, or return None from gold",
        )


def _shown(score: Score) -> str:
    return f"{score.value!r}" if score.value is not None else f"{score.outcome.value} ({score.detail[:200]})"
