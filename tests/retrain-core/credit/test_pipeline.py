"""The pipeline with toy parts: order of the stages, forms of their output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from retrain.credit.pipeline import assign_credit
from retrain.credit.specs import AdvantageSpec, AlgorithmSpec, TransformOutput, TransformSpec, UncertaintySpec
from tests.kit.credit_parts import make_credit_group, make_flow


def test_stages_run_in_their_documented_order() -> None:
    seen: list[str] = []

    def advantage(ctx: Any) -> Any:
        seen.append("advantage")
        assert ctx.params == {"scale": 2.0}
        return ctx.params["scale"] * ctx.rewards_G

    def uncertainty(ctx: Any) -> Any:
        seen.append("uncertainty")
        assert ctx.params == {"p": 1}
        assert_array_equal(ctx.planning_T, [True, False, False])
        return -ctx.logprobs_T

    def pool(uncertainty_T: Any, planning_T: Any, sepa_lambda: float) -> Any:
        seen.append(f"pool {sepa_lambda}")
        assert_array_equal(uncertainty_T, [1, 2, 3])
        return [3.0, 1.0, 2.0]

    def post(advs_T: Any, planning_T: Any, params: Any) -> Any:
        seen.append("post")
        assert params == {"p": 1}
        # 2 (advantage) x [1.5, .5, 1] (weight of the pooled), then HICRA 1.5 x on the planning token
        assert_allclose(advs_T, [4.5, 1.0, 2.0])
        return (advs_T + 1.0).tolist()

    transform = TransformSpec(
        name="t", use_gtpo=True, apply_hicra=True, needs_planning=True, entropy_transform=pool, post_process=post
    )
    flow = make_flow(
        advantage=AdvantageSpec(name="a", compute=advantage),
        uncertainty=UncertaintySpec(name="u", compute=uncertainty),
        transform=transform,
        gtpo_beta=1.0,
        hicra_alpha=0.5,
        mask_rho=0.67,
        advantage_params={"scale": 2.0},
        transform_params={"p": 1},
    )
    group = make_credit_group([1.0], [[-1, -2, -3]], planning=[[True, False, False]])
    result = assign_credit([group], flow, sepa_lambda=0.25)
    assert seen == ["uncertainty", "pool 0.25", "advantage", "post"]
    assert_array_equal(result.uncertainties[0][0], [1, 2, 3])
    assert_array_equal(result.pooled[0][0], [3, 1, 2])
    assert_allclose(result.token_advs[0][0], [0.0, 2.0, 3.0])  # the mask goes by the uncertainty before pooling
    assert result.metrics["entropy_mask_threshold"] == 2.0
    assert result.metrics["entropy_mask_fraction"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("form", [list, tuple, np.array, lambda v: np.array(v, dtype=np.float32)])
def test_lists_tuples_and_arrays_are_the_same(form: Callable[[Any], Any]) -> None:
    flow = make_flow(
        advantage=AdvantageSpec(name="a", compute=lambda ctx: form((2.0 * ctx.rewards_G).tolist())),
        uncertainty=UncertaintySpec(name="u", compute=lambda ctx: form((-ctx.logprobs_T).tolist())),
        transform=TransformSpec(
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
def test_a_whole_transform_sees_one_group_and_its_metrics_are_averaged(as_output: bool) -> None:
    def whole(ctx: Any) -> Any:
        assert (ctx.sepa_lambda, ctx.gtpo_beta, ctx.hicra_alpha, ctx.params) == (0.5, 0.3, 0.4, {"p": 1})
        advs = [[a] * len(u) for a, u in zip(ctx.advantages_G, ctx.uncertainties_G, strict=True)]
        return TransformOutput(token_advs=advs, metrics={"size": len(ctx.rewards_G)}) if as_output else advs

    spec = TransformSpec(name="w", compute_context=whole)
    flow = make_flow(transform=spec, gtpo_beta=0.3, hicra_alpha=0.4, transform_params={"p": 1})
    groups = [make_credit_group([1, 0], [[-1, -1], [-1]]), make_credit_group([1, 0, 0, 0], [[-1], [-1], [-1], [-1]])]
    result = assign_credit(groups, flow, sepa_lambda=0.5)
    assert_array_equal(result.token_advs[0][0], [0.5, 0.5])
    assert_array_equal(result.token_advs[1][3], [-0.25])
    assert result.metrics == ({"size": 3.0} if as_output else {})


def test_an_algorithm_replaces_everything_and_sees_raw_rewards() -> None:
    def refuse(*_: Any) -> Any:
        raise AssertionError("the algorithm replaces this stage")

    def algorithm(ctx: Any) -> Any:
        assert_array_equal(ctx.advantages_G, [3.0, 0.0])
        assert ctx.params == {"alpha": 7}
        return [r + 0.0 * lp for r, lp in zip(ctx.rewards_G, ctx.logprobs_G, strict=True)]

    flow = make_flow(
        advantage=AdvantageSpec(name="a", compute=refuse),
        transform=TransformSpec(name="t", entropy_transform=refuse, post_process=refuse, compute_context=refuse),
        algorithm=AlgorithmSpec(name="my_algorithm", compute_context=algorithm),
        params={"alpha": 7},
    )
    result = assign_credit([make_credit_group([3, 0], [[-1, -1], [-1]])], flow)
    assert_array_equal(result.token_advs[0][0], [3.0, 3.0])
    assert flow.condition == "my_algorithm"


def test_the_mask_is_taken_over_all_trained_tokens_of_the_step() -> None:
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


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_no_mask_and_a_full_mask_give_the_same_credit(rho: float) -> None:
    result = assign_credit([make_credit_group([1, 0], [[-1, -2], [-3]])], make_flow(mask_rho=rho))
    assert [advs.tolist() for advs in result.token_advs[0]] == [[0.5, 0.5], [-0.5]]
    assert result.metrics == ({} if rho == 0.0 else {"entropy_mask_fraction": 1.0})


def test_groups_that_are_not_trained_get_measured_but_no_credit() -> None:
    def refuse(ctx: Any) -> Any:
        raise AssertionError("no credit is asked for")

    flow = make_flow(advantage=AdvantageSpec(name="a", compute=refuse))
    result = assign_credit([make_credit_group([1, 1], [[-1, -2], []])], flow, trained=[False])
    assert [advs.tolist() for advs in result.token_advs[0]] == [[0.0, 0.0], []]
    assert [u.tolist() for u in result.uncertainties[0]] == [[1.0, 2.0], []]


def test_no_groups_and_empty_completions_are_no_fault() -> None:
    assert assign_credit([], make_flow(mask_rho=0.2)).token_advs == ()
    result = assign_credit(
        [make_credit_group([1, 0], [[], [-1]])], make_flow(transform=TransformSpec(name="t", use_gtpo=True))
    )
    assert [advs.tolist() for advs in result.token_advs[0]] == [[], [-0.5]]


def test_inputs_are_never_changed() -> None:
    group = make_credit_group([1, 0], [[-1, -2], [-3]], planning=[[True, False], [True]])
    for array in (group.rewards_G, *group.logprobs_G, *group.planning_G):
        array.flags.writeable = False
    transform = TransformSpec(name="t", use_gtpo=True, apply_hicra=True)
    assign_credit([group], make_flow(transform=transform, mask_rho=0.5))
