import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrain.advantages import UncertaintyContext, gtpo_weights
from retrain.api import CreditError
from retrain_sepa.uncertainties import (
    SHANNON_ENTROPY,
    SURPRISAL,
    predictive_variance,
    shannon_entropy,
    surprisal,
)

U = np.array([0.2, 0.3, 1.8, 0.1, 0.9, 0.2, 2.1, 0.3, 0.1, 0.2])


def context(logprobs, entropies=None):
    entropies_T = None if entropies is None else np.asarray(entropies, dtype=np.float64)
    return UncertaintyContext(logprobs_T=np.asarray(logprobs, dtype=np.float64), entropies_T=entropies_T)


def test_surprisal_is_clamped():
    assert surprisal(context([-0.2, -np.inf, -51.0, 0.0])).tolist() == [0.2, 50.0, 50.0, 0.0]


def test_surprisal_of_an_impossible_token_flattens_the_others():
    weights = gtpo_weights(surprisal(context([-0.2, -np.inf, -0.3])), 0.1)
    np.testing.assert_allclose(weights, [0.901188, 1.197030, 0.901782], atol=5e-7)


def test_predictive_variance_vector():
    expected = [0.148411, 0.192007, 0.137975, 0.086107, 0.241271, 0.148411, 0.107461, 0.192007, 0.086107, 0.148411]
    np.testing.assert_allclose(predictive_variance(context(-U)), expected, atol=5e-7)


def test_rounding_above_zero_is_forgiven_and_more_is_not():
    assert surprisal(context([1e-6])).tolist() == [0.0]
    assert predictive_variance(context([1e-6])).tolist() == [0.0]
    for kind in (surprisal, predictive_variance):
        with pytest.raises(CreditError, match=r"0\.5 at token 1"):
            kind(context([-1.0, 0.5]))


def test_not_a_number_stays_one():
    assert np.isnan(surprisal(context([np.nan]))).all()
    assert np.isnan(predictive_variance(context([np.nan]))).all()
    assert np.isnan(shannon_entropy(context([0.0], [np.nan]))).all()


def test_entropy_is_handed_on():
    assert shannon_entropy(context([-1.0, -1.0], [0.7, -1e-9])).tolist() == [0.7, 0.0]
    assert SHANNON_ENTROPY.needs_entropy
    assert not SURPRISAL.needs_entropy


def test_entropy_missing_or_negative_is_an_error():
    with pytest.raises(CreditError, match="gave none"):
        shannon_entropy(context([-1.0]))
    with pytest.raises(CreditError, match="token 0"):
        shannon_entropy(context([-1.0], [-0.5]))


@given(arrays(np.float64, st.integers(0, 30), elements=st.floats(-700.0, 0.0)))
def test_ranges(logprobs):
    assert ((surprisal(context(logprobs)) >= 0) & (surprisal(context(logprobs)) <= 50)).all()
    variance = predictive_variance(context(logprobs))
    assert ((variance >= 0) & (variance <= 0.25)).all()
    p = np.exp(logprobs)
    np.testing.assert_allclose(variance, p * (1 - p), atol=1e-15)
