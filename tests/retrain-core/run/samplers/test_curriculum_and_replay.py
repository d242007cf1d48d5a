"""The samplers `curriculum`, `replay` and `thompson`; what all must do is in `retrain.testing`, which they pass."""

import json
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import ConfigError, Example, GroupOutcome, PromptChoice, PromptRequest, Seeds
from retrain.kernel.config.plugin_tables import EnvironmentTable, RewardTable
from retrain.kernel.config.resolved import Config
from retrain.kernel.config.schema import DataTable
from retrain.run import retrain_check_config
from retrain.run.samplers import curriculum, replay, thompson
from retrain.tasks.prompts import order_from
from tests.kit.problems import codes_in

POOL, GROUP, SEEDS = 20, 8, Seeds(3)
GRADES = ("easy", "hard")
EXAMPLES = tuple(
    Example(id=f"e{n:02}", prompt="p", reference="r", info={"hard": (n, str(n))[n % 2], "grade": GRADES[n // 10]})
    for n in range(POOL)
)


def make(name, params, examples=EXAMPLES):
    module = {"curriculum": curriculum, "replay": replay}[name]
    training = SimpleNamespace(max_steps=11, group_size=GROUP)
    config = SimpleNamespace(training=training, place=lambda path: f"[{path}]")
    context = SimpleNamespace(params=module.Params(**params), seeds=SEEDS, config=config)
    factory = replay.Replay if name == "replay" else curriculum.create
    return factory(context, examples)


def drawn(sampler, step, count=4, **request):
    """Numbers of the examples that a step draws."""
    cursor = request.pop("cursor", step * count)
    chosen = sampler.choose(PromptRequest(step=step, cursor=cursor, count=count, **request))
    return [int(choice.example_id[1:]) for choice in chosen]


def outcome(number, correct):
    return GroupOutcome(example_id=f"e{number:02}", correct=correct, judged=GROUP, is_informative=0 < correct < GROUP)


def test_the_window_moves_grows_and_is_filled():
    sampler = make("curriculum", {"field": "hard", "window": 0.25})
    spans = [sorted(drawn(sampler, step, 5)) for step in (0, 5, 10, 50)]
    assert spans == [[0, 1, 2, 3, 4], [8, 9, 10, 11, 12], [15, 16, 17, 18, 19], [15, 16, 17, 18, 19]]
    sampler = make("curriculum", {"field": "hard", "window": 0.25, "grows": True, "order": "hard_first", "moves": 3})
    assert sorted(drawn(sampler, 0, 5)) == [15, 16, 17, 18, 19]
    assert sorted(drawn(sampler, 3, POOL)) == list(range(POOL))
    assert min(number for step in range(3, 40) for number in drawn(sampler, step)) < 5
    sampler = make("curriculum", {"field": "hard", "window": 0.1})
    assert sorted(drawn(sampler, 0, 4)) == [0, 1, 2, 3]
    assert sorted(drawn(sampler, 0, 4, taken=frozenset({"e00", "e02"}))) == [1, 3, 4, 5]
    sampler = make("curriculum", {"field": "hard", "window": 0.25, "moves_by": "rate", "moves": 2, "target": 0.75})
    sampler.observe(0, [outcome(0, 6), outcome(1, 5)])
    assert sorted(drawn(sampler, 9, 5)) == [0, 1, 2, 3, 4]
    sampler.observe(1, [outcome(0, 8), outcome(1, 4)])
    sampler.observe(2, [])
    assert sorted(drawn(sampler, 9, 5)) == [8, 9, 10, 11, 12]
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
def test_a_course_that_the_data_cannot_give_is_refused(params, says):
    with pytest.raises(ConfigError, match=says):
        make("curriculum", params)


def test_what_is_no_number_is_named():
    for value in (float("nan"), True, None, "three"):
        odd = (*EXAMPLES, Example(id="odd", prompt="p", reference="r", info={"hard": value}))
        with pytest.raises(ConfigError, match=r"1 of 21 .*\n.*'odd'") as caught:
            make("curriculum", {"field": "hard"}, odd)
        assert codes_in(caught) == ["data.no-difficulty"]


def test_without_anything_to_put_back_replay_is_uniform():
    """A pool's passes overlap in no step, since the step size divides it."""
    sampler = make("replay", {})
    order = [index for index, _ in order_from(SEEDS, POOL, 0, 3 * POOL)]
    assert [number for step in range(15) for number in drawn(sampler, step)] == order


def test_prompts_that_taught_nothing_and_do_now_are_put_back():
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
def test_no_more_than_the_share_is_put_back(share, counts):
    sampler, cursor, back = make("replay", {"share": share, "least_chance": 0.0}), 0, 0
    sampler.observe(0, [outcome(each, 0) for each in range(POOL)])
    for step, count in enumerate(counts, start=1):
        chosen = sampler.choose(PromptRequest(step=step, cursor=cursor, count=count))
        cursor, back = cursor + count, back + sum(not choice.is_uniform for choice in chosen)
    assert back <= cursor * share < back + 1


def test_a_state_after_any_step_goes_on_exactly():
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


PROMPT_COUNT, COUNT, GROUP_SIZE = 90, 8, 8
RATES = (0.0, 0.5, 1.0)  # of example n: a third impossible, a third that teaches, a third trivial
PROMPTS = tuple(Example(id=f"e{n}", prompt="p", reference="r") for n in range(PROMPT_COUNT))
BY_RATE = {"moves_by": "rate"}


def make_thompson(size=PROMPT_COUNT, seed=0, **params):
    context = SimpleNamespace(
        params=thompson.Params(**params),
        seeds=Seeds(seed),
        config=SimpleNamespace(training=SimpleNamespace(group_size=GROUP_SIZE)),
    )
    return thompson.Thompson(context, PROMPTS[:size])


def drawn_outcomes(chosen, rng):
    rights = [int(rng.binomial(GROUP_SIZE, RATES[int(choice.example_id[1:]) % 3])) for choice in chosen]
    return [
        GroupOutcome(
            example_id=choice.example_id, correct=right, judged=GROUP_SIZE, is_informative=0 < right < GROUP_SIZE
        )
        for choice, right in zip(chosen, rights, strict=True)
    ]


def run_thompson(steps, *, seed=0, **params):
    """Every choice of a run, and whether its group taught."""
    sampler, rng = make_thompson(seed=seed, **params), np.random.default_rng(seed)
    chosen, taught = list[PromptChoice](), list[bool]()
    for step in range(steps):
        found = sampler.choose(PromptRequest(step=step, cursor=step * COUNT, count=COUNT))
        became = drawn_outcomes(found, rng)
        sampler.observe(step, became)
        chosen += found
        taught += [each.is_informative for each in became]
    return chosen, taught


def test_it_draws_what_teaches_and_forecasts_how_often():
    """By chance 0.33 of the groups teach; at most 0.9 + 0.1 / 3 = 0.93 do with a tenth that is uniform."""
    chosen, taught = run_thompson(60)
    late = slice(COUNT * 30, None)
    assert np.mean(taught[late]) > 0.75  # measured over 8 seeds: 0.81 to 0.87
    chances = [choice.chance for choice in chosen[late] if choice.chance is not None]
    assert abs(np.mean(chances) - np.mean(taught[late])) < 0.1


@pytest.mark.parametrize("explore", [0.0, 0.1, 1.0])
def test_the_stated_share_is_drawn_from_all_alike(explore):
    chosen, _ = run_thompson(60, explore=explore)
    explored = [choice.example_id for choice in chosen if choice.is_uniform]
    assert abs(len(explored) - explore * 60 * COUNT) < 12  # 48 of 480; the standard deviation is 3.1
    kinds = Counter(int(each[1:]) % 3 for each in explored)
    assert all(abs(kinds[kind] - len(explored) / 3) < 4 * (len(explored) * 2 / 9) ** 0.5 for kind in kinds)


def test_unseen_prompts_are_forecast_as_seen_ones_and_evidence_fades():
    # After a hundred groups that were all wrong, a prompt that nobody tried is expected to be wrong too.
    sampler = make_thompson()
    before = sampler.choose(PromptRequest(step=0, cursor=0, count=1))[0].chance
    all_wrong = [
        GroupOutcome(example_id=f"e{n}", correct=0, judged=GROUP_SIZE, is_informative=False) for n in range(80)
    ]
    sampler.observe(0, all_wrong)
    seen = frozenset(each.example_id for each in all_wrong)
    after = sampler.choose(PromptRequest(step=1, cursor=1, count=1, taken=seen))[0].chance
    assert after < before / 4
    restored, coming = make_thompson(), PromptRequest(step=2, cursor=2, count=8)
    restored.restore(json.loads(json.dumps(sampler.state())))
    assert restored.choose(coming) == sampler.choose(coming) != make_thompson().choose(coming)
    # What was all wrong long ago is drawn again, though only the draws of its posterior bring it back.
    sampler = make_thompson(size=6, explore=0.0, decay=0.5)
    for step in range(4):
        seen = [(f"e{n}", 4 * (n > 2)) for n in range(6)]
        sampler.observe(
            step, [GroupOutcome(example_id=n, correct=c, judged=GROUP_SIZE, is_informative=c > 0) for n, c in seen]
        )
    for step, is_tried in ((4, False), (40, True)):
        requests = (PromptRequest(step=step, cursor=cursor, count=2) for cursor in range(40))
        drawn = {choice.example_id for request in requests for choice in sampler.choose(request)}
        assert bool(drawn & {"e0", "e1", "e2"}) is is_tried


@pytest.mark.parametrize(
    ("tables", "problems"),
    [
        ({"data": {"sampler": "thompson"}, "reward": {"type": "none"}}, 1),
        ({"data": {"sampler": "replay"}, "reward": {"type": "match", "weights": {"none": 1.0}}}, 1),
        ({"data": {"sampler": "thompson"}, "reward": {"type": "match", "weights": {"none": 1.0, "match": 1.0}}}, 0),
        ({"data": {"sampler": "thompson"}, "reward": {"type": "none"}, "environment": {"provider": "agent"}}, 0),
        ({"data": {"sampler": "uniform"}, "reward": {"type": "none"}}, 0),
        ({"data": {"sampler": "curriculum"}, "reward": {"type": "none"}}, 0),
        ({"data": {"sampler": "curriculum", "sampler_params": BY_RATE}, "reward": {"type": "none"}}, 1),
        ({"data": {"sampler": "thompson"}}, 0),
    ],
)
def test_a_sampler_that_goes_by_verdicts_is_refused_where_there_are_none(tables, problems):
    models = {"data": DataTable, "reward": RewardTable, "environment": EnvironmentTable}
    config = Config(tables={name: models[name](**keys) for name, keys in tables.items()})
    assert [each.code for each in retrain_check_config(config)] == ["reward.judges-nothing"] * problems
