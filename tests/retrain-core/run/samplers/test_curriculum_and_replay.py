"""The samplers `curriculum` and `replay`; what every sampler must do is in `retrain.testing`, which both pass."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import ConfigError, Example, GroupOutcome, PromptRequest, Seeds
from retrain.run.samplers import curriculum, replay
from retrain.tasks.prompts import order_from
from tests.kit.problems import codes_in

POOL, GROUP, SEEDS = 20, 8, Seeds(3)
GRADES = ("easy", "hard")
EXAMPLES = tuple(
    Example(id=f"e{n:02}", prompt="p", reference="r", info={"hard": (n, str(n))[n % 2], "grade": GRADES[n // 10]})
    for n in range(POOL)
)


def make(name: str, params: dict[str, Any], examples: Sequence[Example] = EXAMPLES) -> Any:
    module: Any = {"curriculum": curriculum, "replay": replay}[name]
    training = SimpleNamespace(max_steps=11, group_size=GROUP)
    config = SimpleNamespace(training=training, place=lambda path: f"[{path}]")
    context: Any = SimpleNamespace(params=module.Params(**params), seeds=SEEDS, config=config)
    factory = replay.Replay if name == "replay" else curriculum.create
    return factory(context, examples)


def drawn(sampler: Any, step: int, count: int = 4, **request: Any) -> list[int]:
    """Numbers of the examples that a step draws."""
    cursor = request.pop("cursor", step * count)
    chosen = sampler.choose(PromptRequest(step=step, cursor=cursor, count=count, **request))
    return [int(choice.example_id[1:]) for choice in chosen]


def outcome(number: int, correct: int) -> GroupOutcome:
    return GroupOutcome(example_id=f"e{number:02}", correct=correct, judged=GROUP, is_informative=0 < correct < GROUP)


def test_the_window_moves_from_easy_to_hard_with_the_steps() -> None:
    sampler = make("curriculum", {"field": "hard", "window": 0.25})
    spans = [sorted(drawn(sampler, step, 5)) for step in (0, 5, 10, 50)]
    assert spans == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12], [15, 16, 17, 18, 19], [15, 16, 17, 18, 19]]


def test_a_growing_window_keeps_where_it_began_and_may_begin_at_the_hard_end() -> None:
    sampler = make("curriculum", {"field": "hard", "window": 0.25, "grows": True, "order": "hard_first", "moves": 3})
    assert sorted(drawn(sampler, 0, 5)) == [15, 16, 17, 18, 19]
    assert sorted(drawn(sampler, 3, POOL)) == list(range(POOL))
    assert min(number for step in range(3, 40) for number in drawn(sampler, step)) < 5


def test_a_window_that_is_too_small_is_filled_from_beside_it() -> None:
    sampler = make("curriculum", {"field": "hard", "window": 0.1})
    assert sorted(drawn(sampler, 0, 4)) == [0, 1, 2, 3]
    assert sorted(drawn(sampler, 0, 4, taken=frozenset({"e00", "e02"}))) == [1, 3, 4, 5]


def test_the_window_moves_when_the_rate_is_reached() -> None:
    sampler = make("curriculum", {"field": "hard", "window": 0.25, "moves_by": "rate", "moves": 2, "target": 0.75})
    sampler.observe(0, [outcome(0, 6), outcome(1, 5)])
    assert sorted(drawn(sampler, 9, 5)) == [0, 1, 2, 3, 4]
    sampler.observe(1, [outcome(0, 8), outcome(1, 4)])
    sampler.observe(2, [])
    assert sorted(drawn(sampler, 9, 5)) == [8, 9, 10, 11, 12]


def test_texts_are_ordered_by_levels() -> None:
    sampler = make("curriculum", {"field": "grade", "levels": ["hard", "easy"], "window": 0.5})
    assert sorted(drawn(sampler, 0, 10)) == list(range(10, 20))


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"field": "hrd"}, "did you mean 'hard'"),
        ({"field": "grade"}, "20 of 20 training examples have no 'grade' that is a number"),
        ({"field": "grade", "levels": ["easy"]}, "10 of 20 .* one of"),
    ],
)
def test_a_course_that_the_data_cannot_give_is_refused(params: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make("curriculum", params)


def test_what_is_no_number_is_named() -> None:
    for value in (float("nan"), True, None, "three"):
        odd = (*EXAMPLES, Example(id="odd", prompt="p", reference="r", info={"hard": value}))
        with pytest.raises(ConfigError, match=r"1 of 21 .*\n.*'odd'") as caught:
            make("curriculum", {"field": "hard"}, odd)
        assert codes_in(caught) == ["data.no-difficulty"]


def test_without_anything_to_put_back_replay_is_uniform() -> None:
    """A pool's passes overlap in no step, since the step size divides it."""
    sampler = make("replay", {})
    order = [index for index, _ in order_from(SEEDS, POOL, 0, 3 * POOL)]
    assert [number for step in range(15) for number in drawn(sampler, step)] == order


def test_prompts_that_taught_nothing_and_do_now_are_put_back() -> None:
    """Six prompts are learnt together and six never; of three it is known only that they were wrong at first."""
    sampler = make("replay", {"share": 0.5})
    for step in range(8):
        learnt, never = [outcome(each, step) for each in range(6)], [outcome(each, 0) for each in range(10, 16)]
        once = [outcome(each, 0) for each in (6, 7, 16)] if step == 0 else []
        sampler.observe(step, learnt + never + once)
    back = [choice for choice in sampler.choose(PromptRequest(step=12, cursor=48, count=4)) if not choice.is_uniform]
    assert {int(choice.example_id[1:]) for choice in back} <= {6, 7, 16}
    assert len(back) == 2
    assert all(choice.chance >= 0.3 for choice in back)
    sampler.observe(12, [outcome(each, 4) for each in (6, 7, 16)])
    later = sampler.choose(PromptRequest(step=13, cursor=52, count=4))
    assert not {"e06", "e07", "e16"} & {choice.example_id for choice in later if not choice.is_uniform}


@settings(max_examples=25, deadline=None)
@given(st.floats(0.0, 1.0), st.lists(st.integers(1, 7), min_size=1, max_size=12))
def test_no_more_than_the_share_is_put_back(share: float, counts: list[int]) -> None:
    sampler, cursor, back = make("replay", {"share": share, "least_chance": 0.0}), 0, 0
    sampler.observe(0, [outcome(each, 0) for each in range(POOL)])
    for step, count in enumerate(counts, start=1):
        chosen = sampler.choose(PromptRequest(step=step, cursor=cursor, count=count))
        cursor, back = cursor + count, back + sum(not choice.is_uniform for choice in chosen)
    assert back <= cursor * share < back + 1


def test_a_state_after_any_step_goes_on_exactly() -> None:
    """The suite of samplers tries the others; this curriculum moves by the rate of its outcomes."""
    params = {"field": "hard", "moves_by": "rate", "target": 0.4}
    whole, part = (make("curriculum", params) for _ in range(2))
    for step in range(30):
        resumed = make("curriculum", params)
        resumed.restore(json.loads(json.dumps(part.state(), sort_keys=True)))
        part, request = resumed, PromptRequest(step=step, cursor=4 * step, count=4)
        chosen = whole.choose(request)
        assert part.choose(request) == chosen
        numbers = [int(choice.example_id[1:]) for choice in chosen]
        for each in (whole, part):
            each.observe(step, [outcome(n, max(0, min(GROUP, n - 10 + step // 3))) for n in numbers])
