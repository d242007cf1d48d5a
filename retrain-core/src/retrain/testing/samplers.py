"""The suite of samplers: choose distinct training prompts, repeatably, and continue after a resume."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from retrain.kernel.types import Example
from retrain.tasks.sampling import GroupOutcome, PromptChoice, PromptRequest
from retrain.testing.bench import Bench
from retrain.testing.check import expect, expect_same, resumed

POOL, COUNT, STEPS = 12, 4, 9
EXAMPLES = tuple(
    Example(id=f"example {number}", prompt=f"{number} + 1 =", reference=f"{number + 1}", info={"difficulty": number})
    for number in range(POOL)
)


def chooses_training_examples(bench: Bench) -> None:
    """It chooses as many prompts as are requested, and only examples that it was given, down to a pool of one."""
    for size in (1, 3, POOL):
        sampler = _sampler(bench, EXAMPLES[:size])
        for request in _steps(min(size, COUNT)):
            ids = _ids(sampler, request)
            known = {example.id for example in EXAMPLES[:size]}
            why = "another example may be held out for evaluation"
            fix = "choose the ids of the examples that the factory received"
            expect(known.issuperset(ids), f"it chose {[each for each in ids if each not in known]!r}", why=why, fix=fix)
            _observe(sampler, request.step, ids)


def chooses_each_once(bench: Bench) -> None:
    """No prompt twice in a step: neither in one answer nor among those that the step has taken already."""
    sampler = _sampler(bench)
    if getattr(sampler, "in_passes", False):
        return
    for request in _steps(COUNT):
        ids: list[str] = []
        for place in range(0, POOL, COUNT):
            cursor, taken = request.cursor + place, frozenset(ids)
            ids += _ids(sampler, PromptRequest(step=request.step, cursor=cursor, count=COUNT, taken=taken))
        expect(
            len(set(ids)) == POOL,
            f"over the rounds that request all {POOL} prompts, it chose {ids!r}",
            why="a prompt that a step has twice says less than two prompts",
            fix="exclude request.taken, and choose without replacement",
        )
        _observe(sampler, request.step, ids[:COUNT])


def answers_the_same_when_asked_again(bench: Bench) -> None:
    """`choose` changes nothing: a second call, even after one for fewer prompts, returns the same."""
    sampler = _sampler(bench)
    for request in _steps(COUNT):
        first = _ids(sampler, request)
        _ids(sampler, replace(request, count=1))
        again = _ids(sampler, request)
        why = "a step that ran out of memory or was interrupted is chosen again, and must be the same step"
        fix = 'change state in observe() only; draw from context.seeds.stream("sampler", step, cursor)'
        expect(first == again, f"for step {request.step} it chose {first!r}, then {again!r}", why=why, fix=fix)
        _observe(sampler, request.step, first)


def chooses_by_the_seed(bench: Bench) -> None:
    """Two samplers of one seed that observed the same choose the same."""
    one, other = _sampler(bench), _sampler(bench)
    for request in _steps(COUNT):
        chosen = _ids(one, request)
        expect_same(chosen, _ids(other, request), what=f"the prompts of step {request.step}")
        _observe(one, request.step, chosen)
        _observe(other, request.step, chosen)


def bears_groups_that_say_nothing(bench: Bench) -> None:
    """It accepts groups without a verdict, and steps without groups."""
    sampler = _sampler(bench)
    for request in _steps(COUNT):
        ids = _ids(sampler, request) if request.step % 2 else []
        sampler.observe(
            request.step, [GroupOutcome(example_id=each, correct=0, judged=0, is_informative=False) for each in ids]
        )


def goes_on_after_a_resume(bench: Bench) -> None:
    """Restored after any step from its state, after a JSON round trip, it chooses the same prompts."""
    sampler = _sampler(bench)
    for request in _steps(COUNT):
        again = resumed(bench, sampler, [EXAMPLES])
        chosen = _choices(sampler, request)
        expect_same(chosen, _choices(again, request), what=f"the choices for step {request.step}")
        _observe(sampler, request.step, [choice.example_id for choice in chosen])


def _sampler(bench: Bench, examples: Sequence[Example] = EXAMPLES) -> Any:
    return bench.build(given=[examples])


def _steps(count: int) -> Iterator[PromptRequest]:
    return (PromptRequest(step=step, cursor=step * count, count=count) for step in range(STEPS))


def _choices(sampler: Any, request: PromptRequest) -> list[PromptChoice]:
    chosen = list(sampler.choose(request))
    expect(
        len(chosen) == request.count and all(isinstance(choice, PromptChoice) for choice in chosen),
        f"choose() returned {chosen!r:.300} for {request.count} prompts",
        why="a step samples as many prompts as it has",
        fix="return request.count of retrain.api.PromptChoice",
    )
    chances = [choice.chance for choice in chosen if choice.chance is not None]
    wrong = [chance for chance in chances if not 0.0 <= chance <= 1.0]
    expect(not wrong, f"chances {wrong!r}", why="a forecast is a probability", fix="give a number from 0 to 1, or None")
    return chosen


def _ids(sampler: Any, request: PromptRequest) -> list[str]:
    return [choice.example_id for choice in _choices(sampler, request)]


def _observe(sampler: Any, step: int, ids: Sequence[str]) -> None:
    """Report four completions of each prompt, as many of them correct as follows from its number and the step."""
    rights = [(int(each.split()[1]) + step) % 5 for each in ids]
    sampler.observe(
        step,
        [
            GroupOutcome(example_id=each, correct=right, judged=4, is_informative=0 < right < 4)
            for each, right in zip(ids, rights, strict=True)
        ],
    )
