"""Advantages by token: each token keeps its own number through the pipeline, and a verdict is needed only if asked."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose

from retrain.advantages import AdvantageSpec, TokenAdvantageContext, TransformSpec
from retrain.api import ConfigError, Group, Score, StopReason
from retrain.credit.algorithm import CreditAlgorithm
from retrain.credit.flow import build_flow
from retrain.credit.overlong import MaskedOverlong
from retrain.credit.pipeline import CreditGroup, assign_credit
from retrain.kernel.config.load import load_config
from retrain.kernel.plugins.discover import load_plugins
from retrain.kernel.types import GroupStatus
from retrain.testing.toys import scored_groups
from tests.kit.credit_parts import make_credit_group, make_flow
from tests.kit.problems import codes_in

REWARDS = [np.array([0.5, -1.0, 3.0]), np.array([2.0])]
TEACHES = AdvantageSpec(
    name="by_token",
    compute_tokens=lambda ctx: [2.0 * rewards_T for rewards_T in ctx.token_rewards_G],
    needs_token_rewards=True,
    needs_verdict=False,
)


@pytest.fixture
def group() -> CreditGroup:
    return make_credit_group([1, 0], [[-1, -2, -3], [-2]], token_rewards_G=REWARDS)


def test_each_token_keeps_its_own_number(group: CreditGroup) -> None:
    (advs_G,) = assign_credit([group], make_flow(advantage=TEACHES)).token_advs
    assert [advs_T.tolist() for advs_T in advs_G] == [[1.0, -2.0, 6.0], [4.0]]
    clipped = assign_credit([group], make_flow(advantage=TEACHES, advantage_clip=3.0)).token_advs[0]
    assert [advs_T.tolist() for advs_T in clipped] == [[1.0, -2.0, 3.0], [3.0]]
    normed = assign_credit([group], make_flow(advantage=TEACHES, batch_norm=True)).token_advs[0]
    flat = np.array([1.0, -2.0, 6.0, 4.0])  # over tokens, not over completions
    assert_allclose(np.concatenate(normed), (flat - flat.mean()) / flat.std(), atol=1e-6)


def test_stages_weigh_each_tokens_own_number() -> None:
    planning = [[True, False, False], [False]]
    group = make_credit_group([1, 0], [[-1, -2, -3], [-2]], token_rewards_G=REWARDS, planning=planning)
    weighed = make_flow(advantage=TEACHES, transform=TransformSpec(name="t", use_gtpo=True), gtpo_beta=1.0)
    assert_allclose(assign_credit([group], weighed).token_advs[0][0], [0.5, -2.0, 9.0])  # weights 0.5, 1, 1.5
    doubled = TransformSpec(name="t", post_process=lambda advs_T, planning_T, params: np.where(planning_T, 0, advs_T))
    assert assign_credit([group], make_flow(advantage=TEACHES, transform=doubled)).token_advs[0][0][0] == 0.0
    masked = assign_credit([group], make_flow(advantage=TEACHES, mask_rho=0.25)).token_advs[0]
    assert [advs_T.tolist() for advs_T in masked] == [[0.0, 0.0, 6.0], [0.0]]


def test_untrained_groups_get_nothing_where_a_verdict_is_needed(group: CreditGroup) -> None:
    seen: list[Any] = []

    def compute(ctx: TokenAdvantageContext) -> Any:
        seen.append(ctx.rewards_G)
        return ctx.token_rewards_G

    flow = make_flow(advantage=AdvantageSpec(name="a", compute_tokens=compute))
    result = assign_credit([group, group], flow, trained=[False, True])
    assert [any(advs_T.any() for advs_T in advs_G) for advs_G in result.token_advs] == [False, True]
    assert [rewards_G.tolist() for rewards_G in seen] == [[1.0, 0.0]]


def unjudged(group: CreditGroup, *scores: Score) -> Group:
    (scored,) = scored_groups([group])
    rewarded = [
        replace(c, rewards_T=np.concatenate([np.zeros(2), rewards_A]))
        for c, rewards_A in zip(scored.completions, REWARDS, strict=True)
    ]
    return Group(example=scored.example, completions=tuple(rewarded), scores=scores or (Score.no_verdict("none"),) * 2)


@pytest.mark.parametrize(
    "scores",
    [
        (),
        (Score.of(1.0), Score.of(1.0)),
        (Score.of(0.0), Score.of(0.0)),
        (Score.of(0.0), Score.no_verdict("?")),
        (Score.failed("broken"), Score.of(1.0)),
    ],
)
def test_every_group_teaches_where_no_verdict_is_needed(group: CreditGroup, scores: tuple[Score, ...]) -> None:
    algorithm = CreditAlgorithm(flow=make_flow(advantage=TEACHES))
    given = unjudged(group, *scores)
    credit = algorithm.assign(0, [given])
    assert algorithm.needs.token_rewards
    assert (credit.statuses_P, credit.trains(0)) == ((GroupStatus.INFORMATIVE,), True)
    assert [row.advantages_T.tolist() for row in credit.rows] == [[0, 0, 1.0, -2.0, 6.0], [0, 0, 4.0]]
    judging = CreditAlgorithm(flow=make_flow(advantage=replace(TEACHES, needs_verdict=True)))
    assert judging.assign(0, [given]).rows == ()


def test_a_truncated_completion_without_a_verdict_is_masked_too(group: CreditGroup) -> None:
    given = unjudged(group)
    cut = replace(given.completions[0], stop_reason=StopReason.LENGTH)
    given = replace(given, completions=(cut, given.completions[1]))
    credit = MaskedOverlong(CreditAlgorithm(flow=make_flow(advantage=TEACHES))).assign(0, [given])
    assert [row.advantages_T.tolist() for row in credit.rows] == [[0, 0, 4.0]]
    assert (credit.num_masked, credit.metrics["overlong_masked_count"]) == (1, 1)
    assert [tokens.is_masked for tokens in credit.tokens_PG[0]] == [True, False]
    assert not credit.tokens_PG[0][0].advantages_A.any()


def test_a_transform_that_is_one_function_is_refused(tables: Any) -> None:
    flags = ["--advantage-mode", "distillation", "--transform-mode", "json.dumps"]
    config, problems = load_config(None, tables=tables, arguments=flags)
    assert problems == []
    with pytest.raises(ConfigError) as caught:
        build_flow(config, load_plugins())
    assert codes_in(caught) == ["credit.transform-by-group"]
