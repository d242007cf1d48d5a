"""The beta distribution without scipy: against scipy."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import betainc, betaincinv

from retrain.observe.metrics.evaluate import beta_cdf, beta_quantile

EXPONENTS = st.floats(-1, 5)


@given(EXPONENTS, EXPONENTS, st.floats(0, 1))
def test_the_distribution_is_scipys(log_a: float, log_b: float, x: float) -> None:
    a, b = 10**log_a, 10**log_b
    assert beta_cdf(a, b, x) == pytest.approx(float(betainc(a, b, x)), abs=1e-9)


@pytest.mark.parametrize("a", [0.5, 1.0, 63.75, 4096.0])
@pytest.mark.parametrize("b", [0.5, 1.0, 7.25, 1e5])
def test_quantiles_are_scipys(a: float, b: float) -> None:
    for chance in (0.025, 0.5, 0.975):
        assert beta_quantile(a, b, chance) == pytest.approx(float(betaincinv(a, b, chance)), abs=1e-10)
