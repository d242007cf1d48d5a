"""Uncertainty kinds against their formulas, with the rounding that they forgive and the numbers that they refuse."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose

from retrain.advantages import UncertaintyContext
from retrain.api import CreditError
from retrain_sepa.uncertainties import SHANNON_ENTROPY, SURPRISAL, predictive_variance, shannon_entropy, surprisal
from tests.kit.problems import codes_in


def context(logprobs: Any, entropies: Any = None) -> UncertaintyContext:
    entropies_T = None if entropies is None else np.asarray(entropies, dtype=np.float64)
    return UncertaintyContext(logprobs_T=np.asarray(logprobs, dtype=np.float64), entropies_T=entropies_T)


@settings(max_examples=50)
@given(arrays(np.float64, st.integers(0, 30), elements=st.floats(-700.0, 0.0) | st.just(-np.inf)))
def test_surprisal_is_bounded_and_predictive_variance_is_that_of_a_coin(logprobs: np.ndarray) -> None:
    assert_allclose(surprisal(context(logprobs)), np.minimum(-logprobs, 50.0))
    p = np.exp(logprobs)
    finite = logprobs[np.isfinite(logprobs)]
    assert_allclose(predictive_variance(context(finite)), (p * (1 - p))[np.isfinite(logprobs)], atol=1e-15)


def test_rounding_above_zero_is_forgiven() -> None:
    assert surprisal(context([1e-6])).tolist() == predictive_variance(context([1e-6])).tolist() == [0.0]
    assert shannon_entropy(context([-1.0, -1.0], [0.7, -1e-9])).tolist() == [0.7, 0.0]
    assert (SHANNON_ENTROPY.needs_entropy, SURPRISAL.needs_entropy) == (True, False)


def test_not_a_number_stays_one() -> None:
    for kind in (surprisal, predictive_variance, shannon_entropy):
        assert np.isnan(kind(context([0.0 if kind is shannon_entropy else np.nan], [np.nan]))).all()


@pytest.mark.parametrize(
    ("kind", "given_", "code"),
    [
        (surprisal, context([-1.0, 0.5]), "engine.impossible-number"),
        (predictive_variance, context([-1.0, 0.5]), "engine.impossible-number"),
        (shannon_entropy, context([-1.0], [-0.5]), "engine.impossible-number"),
        (shannon_entropy, context([-1.0]), "backend.no-entropies"),
    ],
)
def test_impossible_and_missing_numbers_are_refused(kind: Any, given_: UncertaintyContext, code: str) -> None:
    with pytest.raises(CreditError) as caught:
        kind(given_)
    assert codes_in(caught) == [code]
    assert code.startswith("backend") or f"at token {len(given_.logprobs_T) - 1}" in str(caught.value)
