"""The five conditions through the public credit API, as the training loop runs them."""

import numpy as np
import pytest
from numpy.testing import assert_allclose

from retrain.advantages import compute_composable_advantages
from retrain.api import Config, load_plugins
from retrain.credit.flow import build_flow
from retrain.kernel.config.schema import AlgorithmTable
from tests.kit.problems import refused

U = np.array([0.2, 0.3, 1.8, 0.1, 0.9, 0.2, 2.1, 0.3, 0.1, 0.2])
PLANNING = np.isin(np.arange(10), [2, 6])
REWARDS = [1.0, 0.0, 0.0, 0.0]  # maxrl: 2.999988 and three times -0.999996
TRANSFORMS = ["none", "gtpo", "gtpo_hicra", "gtpo_sepa"]
SEPA_HALF = [2.817944, 2.842137, 3.570968, 2.793750, 2.987298, 2.817944, 3.716129, 2.842137, 2.793750, 2.817944]
HICRA_RIGHT = [2.796774, 2.845161, 4.285161, 2.748387, 3.135484, 2.796774, 4.459355, 2.845161, 2.748387, 2.796774]
HICRA_WRONG = [-0.932258, -0.948387, -0.952258, -0.916129, -1.045161, -0.932258, -0.990968]
HICRA_WRONG += [-0.948387, -0.916129, -0.932258]
GTPO_01 = [0.932258, 0.948387, 1.190323, 0.916129, 1.045161, 0.932258, 1.238710, 0.948387, 0.916129, 0.932258]
GTPO_1 = [0.322581, 0.483871, 2.903226, 0.161290, 1.451613, 0.322581, 3.387097, 0.483871, 0.161290, 0.322581]
GTPO_2 = [0, 0, 4.806452, 0, 1.903226, 0, 5.774193, 0, 0, 0]
BERNOULLI = [0.148411, 0.192007, 0.137975, 0.086107, 0.241271, 0.148411, 0.107461, 0.192007, 0.086107, 0.148411]


def credit(rewards=REWARDS, **settings):
    return compute_composable_advantages(rewards, [-U] * len(rewards), [PLANNING] * len(rewards), **settings)


@pytest.mark.parametrize(("beta", "weights"), [(0.1, GTPO_01), (1.0, GTPO_1), (2.0, GTPO_2)])
def test_gtpo_vectors(beta, weights):
    result = credit(rewards=[1.0, -1.0], advantage_mode="grpo", transform_mode="gtpo", gtpo_beta=beta)
    assert_allclose(result.token_advs, [weights, -np.asarray(weights)], atol=1e-6)


def test_sepa_and_hicra_vectors():
    sepa = credit(transform_mode="gtpo_sepa", sepa_lambda=0.5)
    assert_allclose(sepa.token_advs[0], SEPA_HALF, atol=2e-5)
    assert sepa.uncertainties[0][~PLANNING].var() == pytest.approx(0.058594, abs=5e-7)
    assert sepa.pooled[0][~PLANNING].var() == pytest.approx(0.014648, abs=5e-7)
    assert sepa.pooled[0][PLANNING].tolist() == [1.8, 2.1]
    assert sepa.flow.condition == "maxrl+gtpo_sepa"
    assert_allclose(credit(transform_mode="gtpo_hicra").token_advs[:2], [HICRA_RIGHT, HICRA_WRONG], atol=2e-5)
    assert all(np.ptp(advs) == 0 for advs in credit(transform_mode="none", gtpo_beta=0.7).token_advs)
    bessel = {"advantage_mode": "grpo", "transform_mode": "none", "advantage_params": {"scale": "std", "ddof": 1}}
    firsts = [advs[0] for advs in credit(rewards=[-1, 1, 0, 0.5], **bessel).token_advs]
    assert_allclose(firsts, [-1.317311, 1.024575, -0.146368, 0.439104], atol=5e-7)


def test_each_kind_of_uncertainty():
    assert_allclose(credit(transform_mode="gtpo", uncertainty_kind="pred_var").uncertainties[0], BERNOULLI, atol=5e-7)
    weighted = credit(transform_mode="gtpo", uncertainty_kind="entropy", entropies_G=[U] * 4)
    assert_allclose(weighted.token_advs[0], credit(transform_mode="gtpo").token_advs[0])
    assert refused(credit, transform_mode="gtpo", uncertainty_kind="entropy") == ["backend.no-entropies"]


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_top_rho_acts_with_every_transform(transform):
    result = credit(transform_mode=transform, surprisal_mask_rho=0.2)
    assert result.metrics["entropy_mask_threshold"] == pytest.approx(1.8)
    assert [np.count_nonzero(advs) for advs in result.token_advs] == [2, 2, 2, 2]


@pytest.mark.parametrize("name", ["grpo_none", "maxrl_none", "maxrl_gtpo", "maxrl_gtpo_hicra", "maxrl_gtpo_sepa"])
def test_algorithms_are_pairs(name):
    table = AlgorithmTable(
        algorithm_mode=name, advantage_mode="grpo", transform_mode="gtpo", uncertainty_kind="surprisal"
    )
    flow = build_flow(Config(tables={"algorithm": table}), load_plugins({"RETRAIN_PLUGINS": "retrain-sepa"}))
    advantage, _, transform = name.partition("_")
    assert (flow.advantage.name, flow.transform.name, flow.condition) == (advantage, transform, name)
    assert flow.controller == ("sepa" if transform == "gtpo_sepa" else "")
    assert flow.needs_planning == (transform in ("gtpo_hicra", "gtpo_sepa"))
