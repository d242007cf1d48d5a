import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrain.advantages import gtpo_weights
from retrain.api import CreditError
from retrain_sepa import transforms
from retrain_sepa.transforms import pool_execution

U = np.array([0.2, 0.3, 1.8, 0.1, 0.9, 0.2, 2.1, 0.3, 0.1, 0.2])
PLANNING = np.isin(np.arange(10), [2, 6])
sizes = st.shared(st.integers(1, 40), key="tokens")
uncertainties = arrays(np.float64, sizes, elements=st.floats(0.0, 50.0))
masks = arrays(np.bool_, sizes)
lambdas = st.floats(0.0, 1.0)


def test_half_pooled():
    pooled = pool_execution(U, PLANNING, 0.5)
    expected = [0.243750, 0.293750, 1.8, 0.193750, 0.593750, 0.243750, 2.1, 0.293750, 0.193750, 0.243750]
    np.testing.assert_allclose(pooled, expected, atol=5e-7)
    assert U[~PLANNING].mean() == pytest.approx(0.2875)
    assert U[~PLANNING].var() == pytest.approx(0.058594, abs=5e-7)
    assert pooled[~PLANNING].var() == pytest.approx(0.014648, abs=5e-7)
    weights = [0.939315, 0.947379, 1.190323, 0.931250, 0.995766, 0.939315, 1.238710, 0.947379, 0.931250, 0.939315]
    np.testing.assert_allclose(gtpo_weights(pooled, 0.1), weights, atol=5e-7)


def test_fully_pooled():
    weights = gtpo_weights(pool_execution(U, PLANNING, 1.0), 0.1)
    np.testing.assert_allclose(weights[~PLANNING], 0.946371, atol=5e-7)
    np.testing.assert_allclose(weights[PLANNING], [1.190323, 1.238710], atol=5e-7)


def test_lambda_is_clamped_and_the_input_is_left_alone():
    before = U.copy()
    assert (pool_execution(U, PLANNING, 7.0) == pool_execution(U, PLANNING, 1.0)).all()
    copied = pool_execution(U, PLANNING, -1.0)
    assert (copied == U).all()
    assert not np.shares_memory(copied, U)
    assert (before == U).all()


def test_edges():
    nothing = np.zeros(0)
    assert pool_execution(nothing, nothing.astype(bool), 0.5).size == 0
    assert (pool_execution(U, np.ones(10, bool), 1.0) == U).all()
    with pytest.raises(CreditError, match="9 entries for 10 tokens"):
        pool_execution(U, PLANNING[:9], 0.5)
    with pytest.raises(CreditError, match="lambda"):
        pool_execution(U, PLANNING, float("nan"))


@given(uncertainties, masks, lambdas)
def test_planning_and_means_stay_and_variance_shrinks(uncertainty, planning, strength):
    pooled = pool_execution(uncertainty, planning, strength)
    assert (pooled[planning] == uncertainty[planning]).all()
    assert pooled.mean() == pytest.approx(uncertainty.mean(), abs=1e-9)
    if not planning.all():
        assert pooled[~planning].mean() == pytest.approx(uncertainty[~planning].mean(), abs=1e-9)
        assert pooled[~planning].var() == pytest.approx((1 - strength) ** 2 * uncertainty[~planning].var(), abs=1e-8)


@given(uncertainties, masks, lambdas)
def test_weights_of_planning_tokens_do_not_depend_on_lambda(uncertainty, planning, strength):
    assume(uncertainty.mean() > 1e-3)
    weights = gtpo_weights(pool_execution(uncertainty, planning, strength), 0.1)
    np.testing.assert_allclose(weights[planning], gtpo_weights(uncertainty, 0.1)[planning], rtol=1e-9)


@given(uncertainties, masks, lambdas, st.floats(0.0, 1.0))
def test_weights_average_to_one(uncertainty, planning, strength, beta):
    assert gtpo_weights(pool_execution(uncertainty, planning, strength), beta).mean() == pytest.approx(1.0, abs=1e-9)


def test_stages_of_each_transform():
    used = {
        spec.name: (spec.use_gtpo, spec.needs_planning, spec.uses_sepa_controller, spec.apply_hicra)
        for spec in (transforms.NONE, transforms.GTPO, transforms.GTPO_HICRA, transforms.GTPO_SEPA)
    }
    assert used == {
        "none": (False, False, False, False),
        "gtpo": (True, False, False, False),
        "gtpo_hicra": (True, True, False, True),
        "gtpo_sepa": (True, True, True, False),
    }
