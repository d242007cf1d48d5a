"""Episode advantages over a whole step: what they see, what is trained, normalisation, clip, and their faults."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

from retrain.credit.algorithm import CreditAlgorithm
from retrain.credit.pipeline import assign_credit, named_rewards, normalised
from retrain.credit.specs import AdvantageSpec, StepAdvantageContext
from retrain.kernel.types import Group, GroupStatus, Score
from retrain.records.completions import generation_records
from retrain.testing.toys import scored_groups
from tests.kit.credit_parts import make_credit_group, make_flow

steps = st.lists(arrays(np.float64, st.integers(0, 5), elements=st.floats(-9, 9)), max_size=4)


def over_the_step(step: StepAdvantageContext) -> list[Any]:
    """Reward minus the mean of the step."""
    mean = np.concatenate([np.zeros(0), *step.rewards_PG]).mean()
    return [rewards_G - mean for rewards_G in step.rewards_PG]


STEP_SPEC = AdvantageSpec(name="over_the_step", compute_step=over_the_step)


def test_an_advantage_of_steps_sees_every_judged_completion() -> None:
    seen: list[StepAdvantageContext] = []

    def advantage(step: StepAdvantageContext) -> Any:
        seen.append(step)
        return [rewards_G.tolist() for rewards_G in step.rewards_PG]

    spec = AdvantageSpec(name="a", compute_step=advantage)
    flow = make_flow(advantage=spec, advantage_params={"p": 1}, reward_weights={"x": 2.0, "y": 1.0})
    groups = [
        make_credit_group([1, 0], [[-1, -1], [-1]], named_rewards={"x": np.array([0.5, 0.0])}),
        make_credit_group([1, 1], [[], [-1, -1, -1]]),
        make_credit_group([], []),
    ]
    result = assign_credit(groups, flow, trained=[True, False, False])
    (step,) = seen
    assert [r.tolist() for r in step.rewards_PG] == [[1, 0], [1, 1], []]
    assert [n.tolist() for n in step.lengths_PG] == [[2, 1], [0, 3], []]
    assert [sorted(named) for named in step.named_rewards_PG] == [["x"], [], []]
    assert (step.params, step.reward_weights) == ({"p": 1}, {"x": 2.0, "y": 1.0})
    assert result.trained == (True, True, False)  # the second group has no information of its own, but gets credit
    assert_array_equal(result.token_advs[1][1], [1, 1, 1])


def test_a_group_is_trained_when_the_step_gives_it_credit() -> None:
    given_groups = scored_groups([make_credit_group([1, 1], [[-1, -2], [-1]]), make_credit_group([0, 1], [[-1], [-1]])])
    credit = CreditAlgorithm(flow=make_flow(advantage=STEP_SPEC)).assign(0, given_groups)
    assert credit.statuses_P == (GroupStatus.ALL_RIGHT, GroupStatus.INFORMATIVE)  # the rule for raw scores stays
    assert [row.group for row in credit.rows] == [0, 0, 1, 1]
    assert_allclose(credit.rows[0].advantages_T, [0, 0, 0.25, 0.25])
    assert trained(given_groups, credit) == [True] * 4
    plain = CreditAlgorithm(flow=make_flow()).assign(0, given_groups)
    assert [row.group for row in plain.rows] == [1, 1]
    assert trained(given_groups, plain) == [False, False, True, True]


def trained(groups: list[Group], credit: Any) -> list[bool]:
    class Tokenizer:
        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [str(number) for number in ids]

    prompts = [type("Prompt", (), {"example": group.example})() for group in groups]
    records = generation_records(0, prompts, groups, credit, Tokenizer(), is_trained=True)
    return [record["trained"] for record in records]


@settings(max_examples=50)
@given(steps)
def test_normalised_has_mean_0_and_deviation_1(values_PG: list[Any]) -> None:
    result = np.concatenate([np.zeros(0), *normalised(values_PG)])
    flat = np.concatenate([np.zeros(0), *values_PG])
    if not flat.size or flat.std() < 1e-3:
        return
    assert_allclose(result, (flat - flat.mean()) / (flat.std() + 1e-8), atol=1e-8)


def test_batch_norm_and_clip_follow_any_advantage() -> None:
    """The three groups of the published vector; a fourth without information keeps exact zeros and is counted."""
    step = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
    groups = [make_credit_group(rewards, [[-1]] * 4) for rewards in step]
    result = assign_credit(groups, make_flow(batch_norm=True))
    expected = [1.643168, *[-0.547723] * 3, *[0.547723] * 3, -1.643168, *[1.095445] * 2, *[-1.095445] * 2]
    assert_allclose(np.concatenate([a for group in result.token_advs for a in group]), expected, atol=6e-7)
    clipped = assign_credit(groups, make_flow(batch_norm=True, advantage_clip=1.0))
    assert_allclose(
        np.concatenate([a for group in clipped.token_advs for a in group]), np.clip(expected, -1, 1), atol=6e-7
    )
    more = [*groups, make_credit_group([0.5, 0.5, 0.5], [[-1]] * 3)]
    for trained_P in ([True] * 3 + [False], None):
        wider = assign_credit(more, make_flow(batch_norm=True), trained=trained_P)
        assert not np.concatenate(wider.token_advs[3]).any()
        assert_allclose(wider.token_advs[0][0], [1.643168 * np.sqrt(15 / 12)], atol=6e-7)


def test_batch_norm_trains_no_group_without_information() -> None:
    """An advantage of groups that is not centred: (0 - mean) / std is no reason to punish right answers."""
    flow = make_flow(advantage=AdvantageSpec(name="raw", compute=lambda ctx: ctx.rewards_G), batch_norm=True)
    groups = [make_credit_group([1, 0], [[-1], [-1]]), make_credit_group([1, 1], [[-1], [-1]])]
    result = assign_credit(groups, flow, trained=[True, False])
    assert result.trained == (True, False)
    assert not np.concatenate(result.token_advs[1]).any()


def test_only_names_that_every_completion_has_are_rewards_of_a_group() -> None:
    named = named_rewards([{"a": 1.0, "b": 2.0}, {"b": 0.0, "c": 1.0}])
    assert {name: rewards_G.tolist() for name, rewards_G in named.items()} == {"b": [2.0, 0.0]}
    assert named_rewards([]) == {}


def test_a_score_keeps_its_parts_for_the_advantage() -> None:
    seen: list[Any] = []
    shapings: list[Any] = []

    def advantage(step: StepAdvantageContext) -> Any:
        seen.extend(step.named_rewards_PG)
        shapings.extend(step.shaping_PG)
        return step.rewards_PG

    (group,) = scored_groups([make_credit_group([1, 0, 1], [[-1], [-1], [-1]])])
    scores = tuple(
        Score(outcome=score.outcome, value=score.value, parts={"a": 0.5 * float(score.value or 0)})
        for score in group.scores[:2]
    )
    scored = Group(example=group.example, completions=group.completions, scores=(*scores, Score.no_verdict("?")))
    algorithm = CreditAlgorithm(flow=make_flow(advantage=AdvantageSpec(name="a", compute_step=advantage)))
    algorithm.assign(0, [scored])
    punished = [replace(scored.scores[0], value=0.75), *scored.scores[1:]]
    algorithm.assign(0, [scored.shaped(punished)])
    assert [named["a"].tolist() for named in seen] == [[0.5, 0.0]] * 2
    assert [shaping.tolist() for shaping in shapings] == [[0.0, 0.0], [-0.25, 0.0]]
