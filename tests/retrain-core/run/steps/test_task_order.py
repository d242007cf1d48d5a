"""Several tasks in a run: shares, places after a resume, and tasks whose reward is dead."""

import json
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.contracts.tasks import Prompt
from retrain.kernel.contracts.views import GroupsView
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Group, Score, group_status
from retrain.run.steps.learned_order import LearnedOrder
from retrain.run.steps.sampling_order import NamedSampler, PassOrder
from retrain.run.steps.task_order import TaskOrder, in_turn
from retrain.tasks.prompts import PromptPool
from retrain.tasks.sampling import PromptChoice, Uniform


class Remembering:
    """Chooses by every outcome that it has observed: one more or less, and all choices differ."""

    def __init__(self, ids):
        self.ids, self.seen = ids, []

    def choose(self, request):
        left = [each for each in self.ids if each not in request.taken]
        rng = Seeds(0).stream("sampler", request.step, request.cursor, json.dumps(self.seen))
        return [PromptChoice(example_id=left[at]) for at in rng.permutation(len(left))[: request.count]]

    def observe(self, step, outcomes):
        self.seen.append([step, [[each.example_id, each.correct] for each in outcomes]])

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = list(state["seen"])


def order_of(weights, *, ahead=0, learns=False, size=7, **data):
    keys = {"schedule": "weight", "schedule_temperature": 2.0, "dead_task": "keep", "dead_steps": 2} | data
    config = SimpleNamespace(data=SimpleNamespace(**keys), training=SimpleNamespace(group_size=2))
    tasks, orders = [], []
    for name, weight in weights.items():
        examples = [Example(id=f"{name}/{n}", prompt="p", reference="") for n in range(size)]
        prompts = tuple(Prompt(example=each, tokens_T=np.array([1])) for each in examples)
        pool = PromptPool(train=prompts, held_out=(), seeds=Seeds(3))
        tasks.append(SimpleNamespace(name=name, weight=weight, pool=pool))

        def build(ids=tuple(each.id for each in examples), examples=examples):
            context = SimpleNamespace(seeds=Seeds(3))
            return NamedSampler("s", "[data] sampler", Remembering(ids) if learns else Uniform(context, examples))

        orders.append(LearnedOrder(pool, build) if learns else PassOrder(pool, build()))
    order = TaskOrder(tasks, orders, config)
    order.draw_ahead(ahead)
    return order


def judged(step, prompts, rights=lambda name, step: 1):
    """The groups of a step, two completions each, of which `rights(task, step)` are right; and their credit."""
    groups = tuple(
        Group(
            example=prompt.example,
            completions=(),
            scores=tuple(Score.of(float(at < rights(prompt.example.id.split("/")[0], step))) for at in range(2)),
        )
        for prompt in prompts
    )
    return GroupsView(step=step, groups=groups), Credit(
        statuses_P=tuple(map(group_status, groups)), tokens_PG=(), rows=()
    )


def keys(prompts):
    return [(prompt.example.id, prompt.epoch) for prompt in prompts]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(0.05, 1.0), min_size=1, max_size=6), st.lists(st.integers(1, 9), min_size=1, max_size=20))
def test_every_task_stays_near_its_share_and_the_batch_size_does_not_matter(weights, batches):
    shares = {f"t{n}": weight / sum(weights) for n, weight in enumerate(weights)}
    places, turns = dict.fromkeys(shares, (0, 0.0)), []
    for count in batches:
        found, places = in_turn(shares, places, count)
        turns += found
        assert all(abs(turns.count(name) - share * len(turns)) < 1.5 for name, share in shares.items())
    assert turns == in_turn(shares, dict.fromkeys(shares, (0, 0.0)), sum(batches))[0]
    assert {name: place for name, (place, _) in places.items()} == {name: turns.count(name) for name in shares}


@pytest.mark.parametrize("schedule", ["weight", "posterior"])
@pytest.mark.parametrize("learns", [False, True])
@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_a_resumed_order_draws_what_the_uninterrupted_one_draws(schedule, learns, ahead):
    def rights(name, step):
        return (len(name) + step) % 3

    def run(order, steps, cursor=0, drawn=None):
        """Steps in turn, each drawn `ahead` steps before it is over, as in a run that samples ahead."""
        drawn = {} if drawn is None else drawn
        cursors = {steps.start: cursor}
        ready = {}
        for step in steps:
            for due in range(step, min(step + ahead, steps.stop - 1) + 1):
                if due not in ready:
                    ready[due] = order.draw(cursors[due], 4 + due % 3, due)
                    cursors[due + 1] = cursors[due] + len(ready[due])
            drawn[step] = keys(ready[step])
            view, credit = judged(step, ready[step], rights)
            order.retrain_extra_metrics(view, credit)
            saved = json.dumps(order.retrain_save_state())
            yield step, cursors[step + 1], saved, drawn

    weights = {"a": 1.0, "bb": 2.0}
    make = lambda: order_of(weights, ahead=ahead, learns=learns, schedule=schedule, dead_task="pause")  # noqa: E731
    whole = [*run(make(), range(12))]
    expected = whole[-1][-1]
    for step, cursor, saved, _ in whole[:-1]:
        order = make()
        order.retrain_load_state(json.loads(saved))
        *_, (_, _, _, drawn) = run(order, range(step + 1, 12), cursor)
        assert drawn == {later: expected[later] for later in range(step + 1, 12)}


@pytest.mark.parametrize(("rule", "back"), [("keep", True), ("pause", True), ("end", False)])
def test_a_task_whose_reward_teaches_nothing_is_left_out_by_rule(rule, back, caplog):
    order, cursor, of_dead, fields = order_of({"dead": 1.0, "live": 1.0}, dead_task=rule, size=50), 0, [], {}
    for step in range(9):
        prompts = order.draw(cursor, 4, step)
        cursor += len(prompts)
        of_dead.append(sum(prompt.example.id.startswith("dead/") for prompt in prompts))
        fields = order.retrain_extra_metrics(*judged(step, prompts, lambda name, _: 1 if name == "live" else 0))
    if rule == "keep":
        assert set(of_dead) == {2}
        assert not caplog.messages
    else:
        assert of_dead[:4] == [2, 2, 0, 0]  # two steps without a group that taught
        assert (of_dead[4] > 0) is back
        assert caplog.messages[0].startswith("Task dead ")
        assert (fields.get("tasks_out") == "dead") is not back or rule == "pause"


def test_with_every_task_dead_the_run_goes_on_with_all():
    order, cursor = order_of({"a": 1.0, "b": 1.0}, dead_task="end", size=50), 0
    for step in range(6):
        prompts = order.draw(cursor, 4, step)
        cursor += 4
        assert len({prompt.example.id.split("/")[0] for prompt in prompts}) == 2
        order.retrain_extra_metrics(*judged(step, prompts, lambda *_: 0))


def test_posterior_shares_go_to_the_task_that_teaches_and_leave_the_other_a_little():
    order, cursor, last = order_of({"solved": 1.0, "open": 1.0}, schedule="posterior", size=40), 0, []
    for step in range(20):
        prompts = order.draw(cursor, 8, step)
        cursor += 8
        last = [prompt.example.id.split("/")[0] for prompt in prompts]
        order.retrain_extra_metrics(*judged(step, prompts, lambda name, _: 2 if name == "solved" else 1))
    assert last.count("open") >= 6
    assert cursor == 160


def test_a_smaller_step_after_out_of_memory_begins_at_the_same_places():
    order, twin = (order_of({"a": 1.0, "b": 3.0}) for _ in range(2))
    order.draw(0, 8, 0)
    order.draw(8, 8, 1)  # ahead, and dropped
    assert keys(order.draw(0, 4, 0)) == keys(twin.draw(0, 4, 0))
    assert keys(order.draw(4, 4, 1)) == keys(twin.draw(4, 4, 1))


def test_fields_of_a_rejected_step_change_nothing():
    order = order_of({"a": 1.0})
    assert order.retrain_extra_metrics(None, None) == {}
    view, credit = judged(0, order.draw(0, 2, 0))
    assert order.retrain_extra_metrics(view, replace(credit))["task_a_share"] == 1.0
