"""The prompts of a run as a sampler chooses them: uniform is the order of before, and nothing shifts what is chosen."""

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.contracts.tasks import Prompt, Streams
from retrain.kernel.contracts.views import GroupsView
from retrain.kernel.errors import PluginError
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Example, Group, Score
from retrain.run.steps.learned_order import LearnedOrder
from retrain.run.steps.sampling_order import NamedSampler, PassOrder
from retrain.tasks.prompts import PromptPool
from retrain.tasks.sampling import GroupOutcome, PromptChoice, Uniform
from tests.kit.problems import codes_in

RIGHTS = (0, 1, 2)  # of two completions


def pool_of(size, root=0):
    """A pool of `size` training prompts, and one that is held out."""
    examples = [Example(id=f"e{number}", prompt="p", reference="") for number in range(size + 1)]
    prompts = [Prompt(example=example, tokens_T=np.array([at])) for at, example in enumerate(examples)]
    return PromptPool(train=tuple(prompts[:-1]), held_out=(prompts[-1],), seeds=Seeds(root))


class Remembering:
    """Chooses at random, keyed by every outcome that it has observed: one more or less, and all choices differ."""

    def __init__(self, pool):
        self.ids, self.seen = [prompt.example.id for prompt in pool.train], list[Any]()

    def choose(self, request):
        left = [each for each in self.ids if each not in request.taken]
        rng = Seeds(0).stream("sampler", request.step, request.cursor, json.dumps(self.seen))
        return [PromptChoice(example_id=left[at], chance=0.5) for at in rng.permutation(len(left))[: request.count]]

    def observe(self, step, outcomes):
        self.seen.append([step, [[each.example_id, each.correct, each.judged] for each in outcomes]])

    def state(self):
        return {"seen": self.seen}

    def restore(self, state):
        self.seen = list(state["seen"])


def order_of(pool, build, ahead=0, name="toy"):
    order = LearnedOrder(pool, lambda: NamedSampler(name, "[data] sampler", build()))
    order.draw_ahead(ahead)
    return order


def view(step, prompts):
    """The groups of a step; how many are right depends on example and step."""
    groups = [
        Group(
            example=prompt.example,
            completions=(),
            scores=tuple(Score.of(float(at < RIGHTS[(int(prompt.example.id[1:]) + step) % 3])) for at in range(2)),
        )
        for prompt in prompts
    ]
    return GroupsView(step=step, groups=tuple(groups))


def keys(prompts):
    return [(prompt.example.id, prompt.epoch) for prompt in prompts]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 12), st.integers(0, 60), st.integers(1, 30), st.integers(0, 9), st.integers(0, 3))
def test_uniform_is_the_order_of_before(size, cursor, count, root, ahead):
    """Position p is entry p mod N of the permutation of epoch p // N: prompts, epochs and so completions' seeds."""
    pool = pool_of(size, root)
    context = SimpleNamespace(seeds=pool.seeds)
    uniform = Uniform(context, [prompt.example for prompt in pool.train])
    order = PassOrder(pool, NamedSampler("uniform", "[data] sampler", uniform))
    order.draw_ahead(ahead)
    drawn = order.draw(cursor, count, step=5)
    orders = {epoch: Seeds(root).stream("shuffle", epoch).permutation(size) for epoch in range(90)}
    wanted = [pool.train[orders[at // size][at % size]] for at in range(cursor, cursor + count)]
    assert keys(drawn) == [(prompt.example.id, at // size) for at, prompt in enumerate(wanted, start=cursor)]
    assert keys(drawn) == keys(pool.draw(cursor, count))
    assert [prompt.tokens_T for prompt in drawn] == [prompt.tokens_T for prompt in wanted]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ahead=st.integers(0, 4), sizes=st.lists(st.integers(1, 7), min_size=1, max_size=9))
def test_a_step_is_chosen_by_the_steps_before_it_however_the_run_went(data, ahead, sizes):
    """Step s knows those up to s - 1 - d: whoever is faster, wherever it is interrupted, with rejected steps."""
    pool = pool_of(5)
    rejected = [data.draw(st.booleans()) and data.draw(st.booleans()) for _ in sizes]
    cursors = np.cumsum([0, *sizes]).tolist()
    wanted = []
    for step, count in enumerate(sizes):
        known = Remembering(pool)
        for earlier in range(step - ahead):
            if not rejected[earlier]:
                known.observe(earlier, outcomes(view(earlier, wanted[earlier])))
        wanted.append(order_of(pool, lambda known=known: known).draw(cursors[step], count, step))
    order, drawn, step = order_of(pool, lambda: Remembering(pool), ahead), {}, 0
    while step < len(sizes):
        for coming in range(len(drawn), min(len(sizes), data.draw(st.integers(step + 1, step + 1 + ahead)))):
            drawn[coming] = rounds(order, cursors[coming], sizes[coming], coming, data)
        assert keys(drawn[step]) == keys(wanted[step])
        if data.draw(st.booleans()) and data.draw(st.booleans()):  # its training ran out of memory, or was stopped
            if data.draw(st.booleans()):
                order = resumed(order, pool, ahead)
            drawn = {number: drawn[number] for number in range(step)}
            continue
        if not rejected[step]:
            order.retrain_extra_metrics(groups=view(step, drawn[step]))
        step += 1
        if ahead > 1 and step + ahead < len(sizes) and data.draw(st.booleans()):
            for coming in range(len(drawn), step + ahead + 1):  # a thread that samples is ahead of the checkpoint
                drawn[coming] = order.draw(cursors[coming], sizes[coming], coming)
        if data.draw(st.booleans()):
            order = resumed(order, pool, ahead)
            drawn = {number: drawn[number] for number in range(step)}
    seeds = {Streams(seeds=Seeds(0), purpose="sample").of(each, 0) for prompts in wanted for each in prompts}
    assert len(seeds) == sum(sizes)  # an example that is drawn again gets new completions


def resumed(order, pool, ahead):
    """What a checkpoint of now makes."""
    saved = json.loads(json.dumps(order.retrain_save_state()))
    again = order_of(pool, lambda: Remembering(pool), ahead)
    again.retrain_load_state(state=saved)
    return again


def rounds(order, cursor, count, step, data):
    """A step's prompts, after attempts that ran out of memory."""
    for fewer in data.draw(st.lists(st.integers(1, count), max_size=2)):
        order.draw(cursor, fewer, step)
    return order.draw(cursor, count, step)


def outcomes(given):
    rights = [sum(score.value == 1.0 for score in group.scores) for group in given.groups]
    return [
        GroupOutcome(example_id=group.example.id, correct=right, judged=2, is_informative=right == 1)
        for group, right in zip(given.groups, rights, strict=True)
    ]


@pytest.mark.parametrize(("size", "counts"), [(12, (4, 4, 4)), (5, (4, 4)), (3, (7, 2))])
def test_rounds_of_a_step_take_other_prompts_until_the_pool_is_through(size, counts):
    pool = pool_of(size)
    order, drawn = order_of(pool, lambda: Remembering(pool)), list[Prompt]()
    for count in counts:
        drawn += order.draw(100 + len(drawn), count, step=0)
    for start in range(0, len(drawn), size):
        ids = [prompt.example.id for prompt in drawn[start : start + size]]
        assert len(set(ids)) == len(ids)
    assert {prompt.example.id for prompt in drawn} <= {f"e{number}" for number in range(size)}  # never a held-out one
    assert [prompt.epoch for prompt in drawn] == list(range(100, 100 + len(drawn)))


def test_the_line_tells_of_the_sampler_and_groups_without_verdicts_are_no_evidence():
    pool = pool_of(6)
    order = order_of(pool, lambda: Remembering(pool))
    fields = order.retrain_extra_metrics(groups=view(0, order.draw(0, 4, step=0)))
    assert fields == {"sampler": "toy", "sampler_chance_mean": 0.5, "sampler_uniform_share": 0.0}
    order = order_of(pool, lambda: Exploring(pool))
    given_groups = view(0, order.draw(0, 4, step=0))
    fields = order.retrain_extra_metrics(groups=given_groups)
    first = [score.value for group in given_groups.groups[:2] for score in group.scores]
    assert fields["sampler_uniform_share"] == 0.5
    assert fields["sampler_uniform_correct_rate"] == pytest.approx(np.mean(first))
    pool, sampler = pool_of(2), Remembering(pool_of(2))
    order = order_of(pool, lambda: sampler)
    groups = view(0, order.draw(0, 2, step=0))
    silent = tuple(replace(group, scores=(Score.no_verdict("none"),) * 2, raw_scores=()) for group in groups.groups)
    order.retrain_extra_metrics(groups=GroupsView(step=0, groups=silent))
    assert [each[1:] for each in sampler.seen[0][1]] == [[0, 0], [0, 0]]


class Exploring(Remembering):
    """Draws its first two prompts with equal probability."""

    def choose(self, request):
        return [replace(each, is_uniform=at < 2) for at, each in enumerate(super().choose(request))]


HELD_OUT, KNOWN = PromptChoice(example_id="e3"), PromptChoice(example_id="e0")


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ([HELD_OUT, KNOWN], "sampler.unknown-example"),
        ([KNOWN], "sampler.wrong-count"),
        ([KNOWN, KNOWN], "sampler.repeated-choice"),
        ([KNOWN, PromptChoice(example_id="e1", chance=float("nan"))], "sampler.bad-chance"),
        ([KNOWN, PromptChoice(example_id="e1", chance=1.5)], "sampler.bad-chance"),
        ([KNOWN, None], "plugin.raised"),
    ],
)
def test_a_sampler_that_leaves_its_pool_or_its_contract_ends_the_run(answer, code):
    pool = pool_of(3)

    class Greedy(Remembering):
        def choose(self, request):
            return answer

    order = order_of(pool, lambda: Greedy(pool))
    with pytest.raises(PluginError, match="sampler 'toy'") as caught:
        order.draw(0, 2, step=7)
    assert codes_in(caught) == [code]


def test_after_another_sampler_it_begins_from_nothing_and_says_so(caplog):
    pool = pool_of(4)
    order = order_of(pool, lambda: Remembering(pool))
    order.retrain_extra_metrics(groups=view(0, order.draw(0, 2, step=0)))
    other = order_of(pool, lambda: Remembering(pool), name="other")
    other.retrain_load_state(state=json.loads(json.dumps(order.retrain_save_state())))
    assert "Sampler 'other' begins without the steps before" in caplog.text
    assert keys(other.draw(2, 2, step=1)) == keys(order_of(pool, lambda: Remembering(pool)).draw(2, 2, step=1))
