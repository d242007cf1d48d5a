"""The maths of token credit against the worked vectors, and its invariants on anything else."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from retrain.api import CreditError
from retrain_sepa.transforms import amplify_planning, gtpo_weights, top_rho_threshold

U = np.array([0.2, 0.3, 1.8, 0.1, 0.9, 0.2, 2.1, 0.3, 0.1, 0.2])
PLANNING = np.array([t in (2, 6) for t in range(10)])
W_01 = [0.932258, 0.948387, 1.190323, 0.916129, 1.045161, 0.932258, 1.238710, 0.948387, 0.916129, 0.932258]
W_1 = [0.322581, 0.483871, 2.903226, 0.161290, 1.451613, 0.322581, 3.387097, 0.483871, 0.161290, 0.322581]
W_2 = [0, 0, 4.806452, 0, 1.903226, 0, 5.774193, 0, 0, 0]

UNCERTAINTIES = st.lists(st.floats(0.0, 60.0), min_size=1, max_size=30).map(np.array)


@pytest.mark.parametrize(("beta", "expected", "mean"), [(0.1, W_01, 1.0), (1.0, W_1, 1.0), (2.0, W_2, 1.248387)])
def test_gtpo_weights_of_the_worked_example(beta: float, expected: list[float], mean: float) -> None:
    weights_T = gtpo_weights(U, beta)
    assert_allclose(weights_T, expected, atol=1e-6)
    assert weights_T.mean() == pytest.approx(mean, abs=1e-6)


def test_an_infinite_uncertainty_counts_as_fifty() -> None:
    assert_allclose(gtpo_weights(np.array([0.2, np.inf, 0.3]), 0.1), [0.901188, 1.197030, 0.901782], atol=1e-6)


@pytest.mark.parametrize(
    ("uncertainty_T", "beta"), [(U, 0.0), (np.zeros(4), 1.0), (np.full(4, 9e-8), 1.0), (U[:1], 0.7)]
)
def test_uniform_weights_without_strength_or_uncertainty(uncertainty_T: np.ndarray, beta: float) -> None:
    assert_allclose(gtpo_weights(uncertainty_T, beta), np.ones(len(uncertainty_T)), rtol=1e-15)


def test_no_token_has_no_weight() -> None:
    assert gtpo_weights(np.array([]), 0.1).shape == (0,)


@given(UNCERTAINTIES, st.floats(0.0, 1.0))
def test_gtpo_redistributes_and_never_scales(uncertainty_T: np.ndarray, beta: float) -> None:
    weights_T = gtpo_weights(uncertainty_T, beta)
    assert weights_T.mean() == pytest.approx(1.0, abs=1e-9)
    assert (weights_T >= 1.0 - beta - 1e-9).all()
    order = np.argsort(np.minimum(uncertainty_T, 50.0), kind="stable")
    assert (np.diff(weights_T[order]) >= -1e-9).all()


@given(UNCERTAINTIES, st.floats(0.0, 20.0))
def test_gtpo_weights_are_finite_and_never_negative(uncertainty_T: np.ndarray, beta: float) -> None:
    weights_T = gtpo_weights(uncertainty_T, beta)
    assert np.isfinite(weights_T).all()
    assert (weights_T >= 0.0).all()


@pytest.mark.parametrize(
    ("alpha", "expected"), [(0.2, [1.2, -0.8, 0.5, -0.4, 0]), (1.0, [2, 0, 0.5, 0, 0]), (0.0, [1, -1, 0.5, -0.5, 0])]
)
def test_hicra_of_the_worked_example(alpha: float, expected: list[float]) -> None:
    advantages_T = np.array([1, -1, 0.5, -0.5, 0])
    assert_allclose(amplify_planning(advantages_T, np.array([1, 1, 0, 1, 1], dtype=bool), alpha), expected)
    assert_array_equal(advantages_T, [1, -1, 0.5, -0.5, 0])


@pytest.mark.parametrize(
    ("advantage", "expected"),
    [
        (3, [2.796774, 2.845161, 4.285161, 2.748387, 3.135484, 2.796774, 4.459355, 2.845161, 2.748387, 2.796774]),
        (
            -1,
            [
                -0.932258,
                -0.948387,
                -0.952258,
                -0.916129,
                -1.045161,
                -0.932258,
                -0.990968,
                -0.948387,
                -0.916129,
                -0.932258,
            ],
        ),
    ],
)
def test_hicra_on_top_of_gtpo(advantage: float, expected: list[float]) -> None:
    assert_allclose(amplify_planning(advantage * gtpo_weights(U, 0.1), PLANNING, 0.2), expected, atol=1e-6)


@given(st.lists(st.tuples(st.floats(-9, 9), st.booleans()), max_size=20), st.floats(0.0, 1.0))
def test_hicra_keeps_signs_and_never_lowers(tokens: list[tuple[float, bool]], alpha: float) -> None:
    advantages_T = np.array([a for a, _ in tokens], dtype=np.float64)
    planning_T = np.array([p for _, p in tokens], dtype=np.bool_)
    amplified_T = amplify_planning(advantages_T, planning_T, alpha)
    assert (amplified_T >= advantages_T).all()
    assert (amplified_T * advantages_T >= 0.0).all()
    assert_array_equal(amplified_T[~planning_T], advantages_T[~planning_T])


@pytest.mark.parametrize("length", [0, 1, 4, 6])
def test_a_planning_mask_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(CreditError, match="planning mask has shape"):
        amplify_planning(np.ones(5), np.ones(length, dtype=bool), 0.2)


@pytest.mark.parametrize(
    ("rho", "threshold", "kept"), [(0.2, 1.8, 2), (0.3, 0.9, 3), (0.25, 1.8, 2), (0.05, 2.1, 1), (0.5, 0.3, 5)]
)
def test_top_rho_of_the_worked_example(rho: float, threshold: float, kept: int) -> None:
    found = top_rho_threshold([U[:4], U[4:4], U[4:]], rho)
    assert found == threshold
    assert np.count_nonzero(found <= U) == kept


@pytest.mark.parametrize("rho", [0.0, 1.0])
def test_top_rho_off_or_full_keeps_everything(rho: float) -> None:
    assert top_rho_threshold([U], rho) == -np.inf


@pytest.mark.parametrize("nothing", [[], [np.array([])]])
def test_top_rho_of_nothing_is_no_threshold(nothing: list[np.ndarray]) -> None:
    assert top_rho_threshold(nothing, 0.2) == -np.inf


@given(st.lists(UNCERTAINTIES, min_size=1, max_size=5), st.floats(0.001, 0.999))
def test_top_rho_keeps_the_wanted_share_and_ties(uncertainties: list[np.ndarray], rho: float) -> None:
    flat = np.concatenate(uncertainties)
    threshold = top_rho_threshold(uncertainties, rho)
    rank = max(1, int(np.floor(len(flat) * rho + 1e-9)))
    assert threshold in flat
    assert np.count_nonzero(flat >= threshold) >= rank
    assert np.count_nonzero(flat > threshold) < rank
