"""The five conditions through the public credit API, as the training loop runs them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.advantages import compute_composable_advantages
from retrain.api import Config, ConfigError, CreditError, load_plugins
from retrain.credit.flow import build_flow
from retrain.kernel.config.schema import AlgorithmTable

U = np.array([0.2, 0.3, 1.8, 0.1, 0.9, 0.2, 2.1, 0.3, 0.1, 0.2])
PLANNING = np.isin(np.arange(10), [2, 6])
REWARDS = [1.0, 0.0, 0.0, 0.0]  # maxrl: 2.999988 and three times -0.999996
TOLERANCE = 2e-5  # of A = 2.999988 where the vectors are given for 3
SEPA_HALF = [2.817944, 2.842137, 3.570968, 2.793750, 2.987298, 2.817944, 3.716129, 2.842137, 2.793750, 2.817944]
HICRA_RIGHT = [2.796774, 2.845161, 4.285161, 2.748387, 3.135484, 2.796774, 4.459355, 2.845161, 2.748387, 2.796774]
HICRA_WRONG = [-0.932258, -0.948387, -0.952258, -0.916129, -1.045161, -0.932258, -0.990968]
HICRA_WRONG += [-0.948387, -0.916129, -0.932258]
GTPO_01 = [0.932258, 0.948387, 1.190323, 0.916129, 1.045161, 0.932258, 1.238710, 0.948387, 0.916129, 0.932258]
GTPO_1 = [0.322581, 0.483871, 2.903226, 0.161290, 1.451613, 0.322581, 3.387097, 0.483871, 0.161290, 0.322581]
GTPO_2 = [0, 0, 4.806452, 0, 1.903226, 0, 5.774193, 0, 0, 0]


def credit(rewards=REWARDS, planning=True, **settings):
    count = len(rewards)
    masks = [PLANNING] * count if planning else None
    return compute_composable_advantages(rewards, [-U] * count, masks, **settings)


@pytest.mark.parametrize(("beta", "weights"), [(0.1, GTPO_01), (1.0, GTPO_1), (2.0, GTPO_2)])
def test_gtpo_vectors(beta, weights):
    result = credit(rewards=[1.0, -1.0], advantage_mode="grpo", transform_mode="gtpo", gtpo_beta=beta)
    np.testing.assert_allclose(result.token_advs[0], weights, atol=1e-6)
    np.testing.assert_allclose(result.token_advs[1], -np.asarray(weights), atol=1e-6)


def test_sepa_vector():
    result = credit(transform_mode="gtpo_sepa", sepa_lambda=0.5)
    np.testing.assert_allclose(result.token_advs[0], SEPA_HALF, atol=TOLERANCE)
    assert result.uncertainties[0][~PLANNING].var() == pytest.approx(0.058594, abs=5e-7)
    assert result.pooled[0][~PLANNING].var() == pytest.approx(0.014648, abs=5e-7)


def test_hicra_vectors():
    result = credit(transform_mode="gtpo_hicra")
    np.testing.assert_allclose(result.token_advs[0], HICRA_RIGHT, atol=TOLERANCE)
    np.testing.assert_allclose(result.token_advs[1], HICRA_WRONG, atol=TOLERANCE)


def test_none_spreads_evenly_whatever_beta():
    result = credit(transform_mode="none", gtpo_beta=0.7)
    assert all(np.ptp(advs) == 0 for advs in result.token_advs)


def test_predictive_variance_weighs_tokens():
    result = credit(transform_mode="gtpo", uncertainty_kind="pred_var")
    assert result.uncertainties[0][0] == pytest.approx(0.148411, abs=5e-7)


def test_entropy_kind():
    entropies = [U] * 4
    weighted = credit(transform_mode="gtpo", uncertainty_kind="entropy", entropies_G=entropies)
    plain = credit(transform_mode="gtpo")
    np.testing.assert_allclose(weighted.token_advs[0], plain.token_advs[0])
    with pytest.raises(CreditError, match="entrop"):
        credit(transform_mode="gtpo", uncertainty_kind="entropy")


@pytest.mark.parametrize("transform", ["none", "gtpo", "gtpo_hicra", "gtpo_sepa"])
def test_top_rho_acts_with_every_transform(transform):
    result = credit(transform_mode=transform, surprisal_mask_rho=0.2)
    assert result.metrics["entropy_mask_threshold"] == pytest.approx(1.8)
    assert [np.count_nonzero(advs) for advs in result.token_advs] == [2, 2, 2, 2]


def test_parameters_reach_the_advantage():
    scaled = credit(
        rewards=[-1, 1, 0, 0.5],
        advantage_mode="grpo",
        transform_mode="none",
        advantage_params={"scale": "std", "ddof": 1},
    )
    firsts = [advs[0] for advs in scaled.token_advs]
    np.testing.assert_allclose(firsts, [-1.317311, 1.024575, -0.146368, 0.439104], atol=5e-7)
    with pytest.raises(ConfigError, match="scale"):
        credit(advantage_mode="grpo", advantage_params={"scal": "std"})


@pytest.mark.parametrize(
    ("name", "advantage", "transform"),
    [
        ("grpo_none", "grpo", "none"),
        ("maxrl_none", "maxrl", "none"),
        ("maxrl_gtpo", "maxrl", "gtpo"),
        ("maxrl_gtpo_hicra", "maxrl", "gtpo_hicra"),
        ("maxrl_gtpo_sepa", "maxrl", "gtpo_sepa"),
    ],
)
def test_algorithms_are_pairs(name, advantage, transform):
    table = AlgorithmTable(
        algorithm_mode=name, advantage_mode="grpo", transform_mode="gtpo", uncertainty_kind="surprisal"
    )
    flow = build_flow(Config(tables={"algorithm": table}), load_plugins({"RETRAIN_PLUGINS": "retrain-sepa"}))
    assert (flow.advantage.name, flow.transform.name, flow.condition) == (advantage, transform, name)
    assert flow.controller == ("sepa" if transform == "gtpo_sepa" else "")
    assert flow.needs_planning == (transform in ("gtpo_hicra", "gtpo_sepa"))


@given(st.permutations(range(4)), st.sampled_from(["none", "gtpo", "gtpo_hicra", "gtpo_sepa"]))
def test_order_in_the_group_does_not_matter(order, transform):
    rewards = np.array([1.0, 0.0, 0.5, 0.0])
    logprobs = [-U * (n + 1) for n in range(4)]
    settings = {"transform_mode": transform, "sepa_lambda": 0.3}
    straight = compute_composable_advantages(rewards, logprobs, [PLANNING] * 4, **settings)
    permuted = compute_composable_advantages(rewards[order], [logprobs[i] for i in order], [PLANNING] * 4, **settings)
    for place, original in enumerate(order):
        np.testing.assert_allclose(permuted.token_advs[place], straight.token_advs[original], rtol=1e-9)
