"""The pipeline with toy parts: order of the stages, forms of their output, advantages by step and by token."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

from retrain.api import StopReason
from retrain.credit import specs
from retrain.credit.algorithm import CreditAlgorithm
from retrain.credit.flow import build_flow
from retrain.credit.overlong import MaskedOverlong
from retrain.credit.pipeline import assign_credit, named_rewards, normalised
from retrain.kernel.config.load import load_config
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.types import Group, GroupStatus, Score
from retrain.records.completions import generation_records
from retrain.testing.toys import scored_groups
from tests.kit.credit_parts import make_credit_group, make_flow
from tests.kit.problems import refused


def test_stages_run_in_their_documented_order():
    seen = []

    def advantage(ctx):
        seen.append("advantage")
        assert ctx.params == {"scale": 2.0}
        return ctx.params["scale"] * ctx.rewards_G

    def uncertainty(ctx):
        seen.append("uncertainty")
        assert ctx.params == {"p": 1}
        assert_array_equal(ctx.planning_T, [True, False, False])
        return -ctx.logprobs_T

    def pool(uncertainty_T, planning_T, sepa_lambda):
        seen.append(f"pool {sepa_lambda}")
        assert_array_equal(uncertainty_T, [1, 2, 3])
        return [3.0, 1.0, 2.0]

    def post(advs_T, planning_T, params):
        seen.append("post")
        assert params == {"p": 1}
        # 2 (advantage) x [1.5, .5, 1] (weight of the pooled), then HICRA 1.5 x on the planning token
        assert_allclose(advs_T, [4.5, 1.0, 2.0])
        return (advs_T + 1.0).tolist()

    transform = specs.TransformSpec(
        name="t", use_gtpo=True, apply_hicra=True, needs_planning=True, entropy_transform=pool, post_process=post
    )
    flow = make_flow(
        advantage=specs.AdvantageSpec(name="a", compute=advantage),
        uncertainty=specs.UncertaintySpec(name="u", compute=uncertainty),
        transform=transform,
        gtpo_beta=1.0,
        hicra_alpha=0.5,
        mask_rho=0.67,
        advantage_params={"scale": 2.0},
        transform_params={"p": 1},
    )
    group = make_credit_group([1.0], [[-1, -2, -3]], planning=[[True, False, False]])
    for array in (group.rewards_G, *group.logprobs_G, *group.planning_G):
        array.flags.writeable = False
    result = assign_credit([group], flow, sepa_lambda=0.25)
    assert seen == ["uncertainty", "pool 0.25", "advantage", "post"]
    assert_array_equal(result.uncertainties[0][0], [1, 2, 3])
    assert_array_equal(result.pooled[0][0], [3, 1, 2])
    assert_allclose(result.token_advs[0][0], [0.0, 2.0, 3.0])  # the mask goes by the uncertainty before pooling
    assert result.metrics["entropy_mask_threshold"] == 2.0
    assert result.metrics["entropy_mask_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda v: np.array(v, dtype=np.float32)])
def test_lists_tuples_and_arrays_are_the_same(form):
    flow = make_flow(
        advantage=specs.AdvantageSpec(name="a", compute=lambda ctx: form((2.0 * ctx.rewards_G).tolist())),
        uncertainty=specs.UncertaintySpec(name="u", compute=lambda ctx: form((-ctx.logprobs_T).tolist())),
        transform=specs.TransformSpec(
            name="t",
            use_gtpo=True,
            entropy_transform=lambda u, p, lam: form(u.tolist()),
            post_process=lambda a, p, params: form(a.tolist()),
        ),
        gtpo_beta=1.0,
    )
    result = assign_credit([make_credit_group([1, 0.5], [[-1, -3], [-2]])], flow)
    assert_array_equal(result.token_advs[0][0], [1.0, 3.0])
    assert_array_equal(result.token_advs[0][1], [1.0])
    assert all(array.dtype == np.float64 for array in result.token_advs[0])


@pytest.mark.parametrize("as_output", [True, False])
def test_a_whole_transform_sees_one_group_and_its_metrics_are_averaged(as_output):
    def whole(ctx):
        assert (ctx.sepa_lambda, ctx.gtpo_beta, ctx.hicra_alpha, ctx.params) == (0.5, 0.3, 0.4, {"p": 1})
        advs = [[a] * len(u) for a, u in zip(ctx.advantages_G, ctx.uncertainties_G, strict=True)]
        return specs.TransformOutput(token_advs=advs, metrics={"size": len(ctx.rewards_G)}) if as_output else advs

    spec = specs.TransformSpec(name="w", compute_context=whole)
    flow = make_flow(transform=spec, gtpo_beta=0.3, hicra_alpha=0.4, transform_params={"p": 1})
    groups = [make_credit_group([1, 0], [[-1, -1], [-1]]), make_credit_group([1, 0, 0, 0], [[-1], [-1], [-1], [-1]])]
    result = assign_credit(groups, flow, sepa_lambda=0.5)
    assert_array_equal(result.token_advs[0][0], [0.5, 0.5])
    assert_array_equal(result.token_advs[1][3], [-0.25])
    assert result.metrics == ({"size": 3.0} if as_output else {})


def test_an_algorithm_replaces_everything_and_sees_raw_rewards():
    def refuse(*_):
        raise AssertionError("the algorithm replaces this stage")

    def algorithm(ctx):
        assert_array_equal(ctx.advantages_G, [3.0, 0.0])
        assert ctx.params == {"alpha": 7}
        return [r + 0.0 * lp for r, lp in zip(ctx.rewards_G, ctx.logprobs_G, strict=True)]

    flow = make_flow(
        advantage=specs.AdvantageSpec(name="a", compute=refuse),
        transform=specs.TransformSpec(name="t", entropy_transform=refuse, post_process=refuse, compute_context=refuse),
        algorithm=specs.AlgorithmSpec(name="my_algorithm", compute_context=algorithm),
        params={"alpha": 7},
    )
    result = assign_credit([make_credit_group([3, 0], [[-1, -1], [-1]])], flow)
    assert_array_equal(result.token_advs[0][0], [3.0, 3.0])
    assert flow.condition == "my_algorithm"


def test_the_mask_is_taken_over_all_trained_tokens_of_the_step():
    groups = [
        make_credit_group([1, 0], [[-1, -2], [-3]]),
        make_credit_group([1, 1], [[-100.0], [-200.0]]),  # not trained: takes no part in the threshold
        make_credit_group([1, 0], [[-4], [-5, -0.5, -0.1]]),
    ]
    flow = make_flow(mask_rho=0.5)
    result = assign_credit(groups, flow, trained=[True, False, True])
    # seven trained tokens, rank 3: the threshold is 3
    assert result.metrics == {"entropy_mask_fraction": pytest.approx(3 / 7), "entropy_mask_threshold": 3.0}
    assert [advs.tolist() for group in result.token_advs for advs in group] == [
        *([0.0, 0.0], [-0.5]),
        *([0.0], [0.0]),
        *([0.5], [-0.5, 0.0, 0.0]),
    ]
    assert [u.tolist() for u in result.uncertainties[1]] == [[100.0], [200.0]], "measured without credit"
    for rho, metrics in ((0.0, {}), (1.0, {"entropy_mask_fraction": 1.0})):
        result = assign_credit([make_credit_group([1, 0], [[-1, -2], []])], make_flow(mask_rho=rho))
        assert ([a.tolist() for a in result.token_advs[0]], result.metrics) == ([[0.5, 0.5], []], metrics)
    assert assign_credit([], make_flow(mask_rho=0.2)).token_advs == ()


REWARDS = [np.array([0.5, -1.0, 3.0]), np.array([2.0])]
TEACHES = specs.AdvantageSpec(
    name="by_token",
    compute_tokens=lambda ctx: [2.0 * rewards_T for rewards_T in ctx.token_rewards_G],
    needs_token_rewards=True,
    needs_verdict=False,
)


@pytest.fixture
def group():
    return make_credit_group([1, 0], [[-1, -2, -3], [-2]], token_rewards_G=REWARDS)


def test_each_token_keeps_its_own_number(group):
    (advs_G,) = assign_credit([group], make_flow(advantage=TEACHES)).token_advs
    assert [advs_T.tolist() for advs_T in advs_G] == [[1.0, -2.0, 6.0], [4.0]]
    clipped = assign_credit([group], make_flow(advantage=TEACHES, advantage_clip=3.0)).token_advs[0]
    assert [advs_T.tolist() for advs_T in clipped] == [[1.0, -2.0, 3.0], [3.0]]
    normed = assign_credit([group], make_flow(advantage=TEACHES, batch_norm=True)).token_advs[0]
    flat = np.array([1.0, -2.0, 6.0, 4.0])  # over tokens, not over completions
    assert_allclose(np.concatenate(normed), (flat - flat.mean()) / flat.std(), atol=1e-6)
    planning = [[True, False, False], [False]]
    group = make_credit_group([1, 0], [[-1, -2, -3], [-2]], token_rewards_G=REWARDS, planning=planning)
    weighed = make_flow(advantage=TEACHES, transform=specs.TransformSpec(name="t", use_gtpo=True), gtpo_beta=1.0)
    assert_allclose(assign_credit([group], weighed).token_advs[0][0], [0.5, -2.0, 9.0])  # weights 0.5, 1, 1.5
    doubled = specs.TransformSpec(
        name="t", post_process=lambda advs_T, planning_T, params: np.where(planning_T, 0, advs_T)
    )
    assert assign_credit([group], make_flow(advantage=TEACHES, transform=doubled)).token_advs[0][0][0] == 0.0
    masked = assign_credit([group], make_flow(advantage=TEACHES, mask_rho=0.25)).token_advs[0]
    assert [advs_T.tolist() for advs_T in masked] == [[0.0, 0.0, 6.0], [0.0]]


def test_untrained_groups_get_nothing_where_a_verdict_is_needed(group):
    seen = []

    def compute(ctx):
        seen.append(ctx.rewards_G)
        return ctx.token_rewards_G

    flow = make_flow(advantage=specs.AdvantageSpec(name="a", compute_tokens=compute))
    result = assign_credit([group, group], flow, trained=[False, True])
    assert [any(advs_T.any() for advs_T in advs_G) for advs_G in result.token_advs] == [False, True]
    assert [rewards_G.tolist() for rewards_G in seen] == [[1.0, 0.0]]
    given = unjudged(group)
    cut = replace(given.completions[0], stop_reason=StopReason.LENGTH)
    given = replace(given, completions=(cut, given.completions[1]))
    credit = MaskedOverlong(CreditAlgorithm(flow=make_flow(advantage=TEACHES))).assign(0, [given])
    assert [row.advantages_T.tolist() for row in credit.rows] == [[0, 0, 4.0]]
    assert (credit.num_masked, credit.metrics["overlong_masked_count"]) == (1, 1)
    assert [tokens.is_masked for tokens in credit.tokens_PG[0]] == [True, False]
    assert not credit.tokens_PG[0][0].advantages_A.any()


def unjudged(group, *scores):
    (scored,) = scored_groups([group])
    rewarded = [
        replace(c, rewards_T=np.concatenate([np.zeros(2), rewards_A]))
        for c, rewards_A in zip(scored.completions, REWARDS, strict=True)
    ]
    return Group(example=scored.example, completions=tuple(rewarded), scores=scores or (Score.no_verdict("none"),) * 2)


@pytest.mark.parametrize(
    "scores",
    [
        *((), (Score.of(1.0), Score.of(1.0)), (Score.of(0.0), Score.of(0.0)), (Score.of(0.0), Score.no_verdict("?"))),
        (Score.failed("broken"), Score.of(1.0)),
    ],
)
def test_every_group_teaches_where_no_verdict_is_needed(group, scores):
    algorithm = CreditAlgorithm(flow=make_flow(advantage=TEACHES))
    given = unjudged(group, *scores)
    credit = algorithm.assign(0, [given])
    assert algorithm.needs.token_rewards
    assert (credit.statuses_P, credit.trains(0)) == ((GroupStatus.INFORMATIVE,), True)
    assert [row.advantages_T.tolist() for row in credit.rows] == [[0, 0, 1.0, -2.0, 6.0], [0, 0, 4.0]]
    judging = CreditAlgorithm(flow=make_flow(advantage=replace(TEACHES, needs_verdict=True)))
    assert judging.assign(0, [given]).rows == ()


def test_a_transform_that_is_one_function_is_refused(tables):
    flags = ["--advantage-mode", "distillation", "--transform-mode", "json.dumps"]
    config, problems = load_config(None, tables=tables, arguments=flags)
    assert problems == []
    assert refused(build_flow, config, load_plugins()) == ["credit.transform-by-group"]


def over_the_step(step):
    """Reward minus the mean of the step."""
    mean = np.concatenate([np.zeros(0), *step.rewards_PG]).mean()
    return [rewards_G - mean for rewards_G in step.rewards_PG]


def test_an_advantage_of_steps_sees_every_judged_completion():
    seen = []

    def advantage(step):
        seen.append(step)
        return [rewards_G.tolist() for rewards_G in step.rewards_PG]

    spec = specs.AdvantageSpec(name="a", compute_step=advantage)
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


def test_a_group_is_trained_when_the_step_gives_it_credit():
    given_groups = scored_groups([make_credit_group([1, 1], [[-1, -2], [-1]]), make_credit_group([0, 1], [[-1], [-1]])])
    flow = make_flow(advantage=specs.AdvantageSpec(name="over_the_step", compute_step=over_the_step))
    credit = CreditAlgorithm(flow=flow).assign(0, given_groups)
    assert credit.statuses_P == (GroupStatus.ALL_RIGHT, GroupStatus.INFORMATIVE)  # the rule for raw scores stays
    assert [row.group for row in credit.rows] == [0, 0, 1, 1]
    assert_allclose(credit.rows[0].advantages_T, [0, 0, 0.25, 0.25])
    assert trained(given_groups, credit) == [True] * 4
    plain = CreditAlgorithm(flow=make_flow()).assign(0, given_groups)
    assert [row.group for row in plain.rows] == [1, 1]
    assert trained(given_groups, plain) == [False, False, True, True]


def trained(groups, credit):
    class Tokenizer:
        def convert_ids_to_tokens(self, ids):
            return [str(number) for number in ids]

    prompts = [type("Prompt", (), {"example": group.example})() for group in groups]
    records = generation_records(0, prompts, groups, credit, Tokenizer(), is_trained=True)
    return [record["trained"] for record in records]


@settings(max_examples=50)
@given(st.lists(arrays(np.float64, st.integers(0, 5), elements=st.floats(-9, 9)), max_size=4))
def test_normalised_has_mean_0_and_deviation_1(values_PG):
    result = np.concatenate([np.zeros(0), *normalised(values_PG)])
    flat = np.concatenate([np.zeros(0), *values_PG])
    if not flat.size or flat.std() < 1e-3:
        return
    assert_allclose(result, (flat - flat.mean()) / (flat.std() + 1e-8), atol=1e-8)


def test_advantages_are_normalised_within_each_task_and_of_one_task_as_of_the_step():
    rewards = [[1.0, 0.0, 0.0, 0.0], [8.0, 0.0], [0.0, 0.0, 1.0], [2.0, 9.0]]
    groups = [
        replace(make_credit_group(each, [[-1]] * len(each)), task=task)
        for each, task in zip(rewards, "abab", strict=True)
    ]
    found = assign_credit(groups, make_flow(batch_norm=True)).token_advs
    for task in "ab":
        own = [group for group in groups if group.task == task]
        alone = assign_credit([replace(group, task="") for group in own], make_flow(batch_norm=True)).token_advs
        by_task = [advs_G for group, advs_G in zip(groups, found, strict=True) if group.task == task]
        assert np.array_equal(np.concatenate([*by_task[0], *by_task[1]]), np.concatenate([*alone[0], *alone[1]]))
    whole = assign_credit([replace(group, task="") for group in groups], make_flow(batch_norm=True)).token_advs
    assert not np.allclose(whole[1][0], found[1][0])


def test_batch_norm_and_clip_follow_any_advantage():
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
    raw = specs.AdvantageSpec(name="raw", compute=lambda ctx: ctx.rewards_G)  # not centred
    groups = [make_credit_group([1, 0], [[-1], [-1]]), make_credit_group([1, 1], [[-1], [-1]])]
    result = assign_credit(groups, make_flow(advantage=raw, batch_norm=True), trained=[True, False])
    assert (result.trained, np.concatenate(result.token_advs[1]).any()) == ((True, False), False)


def test_a_score_keeps_its_parts_for_the_advantage():
    seen = []
    shapings = []

    def advantage(step):
        seen.extend(step.named_rewards_PG)
        shapings.extend(step.shaping_PG)
        return step.rewards_PG

    (group,) = scored_groups([make_credit_group([1, 0, 1], [[-1], [-1], [-1]])])
    scores = tuple(
        Score(outcome=score.outcome, value=score.value, parts={"a": 0.5 * float(score.value or 0)})
        for score in group.scores[:2]
    )
    scored = Group(example=group.example, completions=group.completions, scores=(*scores, Score.no_verdict("?")))
    algorithm = CreditAlgorithm(flow=make_flow(advantage=specs.AdvantageSpec(name="a", compute_step=advantage)))
    algorithm.assign(0, [scored])
    punished = [replace(scored.scores[0], value=0.75), *scored.scores[1:]]
    algorithm.assign(0, [scored.shaped(punished)])
    assert [named["a"].tolist() for named in seen] == [[0.5, 0.0]] * 2
    named = named_rewards([{"a": 1.0, "b": 2.0}, {"b": 0.0, "c": 1.0}])  # names that every completion has
    assert {name: rewards_G.tolist() for name, rewards_G in named.items()} == {"b": [2.0, 0.0]}
    assert named_rewards([]) == {}
    assert [shaping.tolist() for shaping in shapings] == [[0.0, 0.0], [-0.25, 0.0]]
