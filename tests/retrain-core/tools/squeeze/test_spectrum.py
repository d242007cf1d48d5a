"""Singular values through the core, best approximations, and the share V(k)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrain.kernel.errors import ConfigError
from retrain.tools.squeeze.spectrum import BLOCK_ROWS, Solver, solver_for, variance_kept

SOLVERS = ["numpy", "torch"]
Factors = tuple[np.ndarray, np.ndarray]
Random = Callable[..., Factors]
numbers = st.floats(-10, 10, allow_nan=False, width=32)


@pytest.fixture(params=SOLVERS)
def solver(request: pytest.FixtureRequest) -> Solver:
    if request.param == "numpy":
        return Solver()
    pytest.importorskip("torch")
    from retrain.tools.squeeze.spectrum import TorchSolver

    return TorchSolver("cpu")


def test_the_documented_singular_values(solver: Solver, documented_factors: Factors) -> None:
    a, b = documented_factors
    s = solver.singular_values(a, b)
    np.testing.assert_allclose(s, [4.215848, 3.174673, 2.031152, 0.0], atol=5e-7)
    assert s[3] == 0.0
    np.testing.assert_allclose(variance_kept(s), [0.555809, 0.870985, 1.0, 1.0], atol=5e-7)


@pytest.mark.parametrize(
    ("s", "wanted"),
    [
        ([4.0, 3.0, 2.0, 1.0], [0.533333, 0.833333, 0.966667, 1.0]),
        ([1.0, 0.1, 0.05, 0.01], [0.987557, 0.997432, 0.999901, 1.0]),
        ([1e-200, 0.0], [1.0, 1.0]),
        ([1e200, 1e200], [0.5, 1.0]),
    ],
)
def test_documented_shares(s: list[float], wanted: list[float]) -> None:
    np.testing.assert_allclose(variance_kept(np.array(s)), wanted, atol=5e-7)


@pytest.mark.parametrize(("rank", "error", "relative"), [(1, 3.768836, 0.666477), (2, 2.031152, 0.359187), (3, 0, 0)])
def test_the_documented_errors_of_the_best_approximation(
    rank: int, error: float, relative: float, solver: Solver, documented_factors: Factors
) -> None:
    a, b = documented_factors
    small_a, small_b, _ = solver.truncate(a, b, rank)
    assert (small_a.shape, small_b.shape) == ((rank, 6), (5, rank))
    found = float(np.linalg.norm(b @ a - small_b @ small_a))
    assert found == pytest.approx(error, abs=5e-7)
    assert found / np.linalg.norm(b @ a) == pytest.approx(relative, abs=5e-7)
    assert rank != 2 or [np.linalg.norm(small_a), np.linalg.norm(small_b)] == pytest.approx([2.718551] * 2, abs=5e-7)


@pytest.mark.parametrize(("inner", "outer"), [(3, 3), (3, 20), (20, 3), (1, 1)])
def test_a_rank_above_the_shape_is_filled_with_zeros(
    inner: int, outer: int, solver: Solver, random_factors: Random
) -> None:
    a, b = random_factors(0, rank=8, inner=inner, outer=outer)
    s = solver.singular_values(a, b)
    exact = np.linalg.svd(b @ a, compute_uv=False)
    np.testing.assert_allclose(s[: len(exact)], exact, rtol=1e-9, atol=1e-12)
    assert not s[len(exact) :].any()
    small_a, small_b, again = solver.truncate(a, b, 8)
    assert (small_a.shape, small_b.shape) == (a.shape, b.shape)
    np.testing.assert_allclose(small_b @ small_a, b @ a, atol=1e-9)
    np.testing.assert_allclose(again, s, atol=1e-9)


@pytest.mark.parametrize("rank", [3, 64])
def test_tall_factors_are_taken_in_blocks_and_nothing_changes(rank: int, random_factors: Random) -> None:
    rows = 9 * BLOCK_ROWS + 17
    a, b = random_factors(1, rank=rank, inner=2 * BLOCK_ROWS + 5, outer=rows)
    s = Solver().singular_values(a, b)
    whole = np.linalg.qr(b, mode="r") @ np.linalg.qr(a.T, mode="r").T
    np.testing.assert_allclose(s, np.linalg.svd(whole, compute_uv=False), rtol=1e-10)
    small_a, small_b, _ = Solver().truncate(a, b, rank)
    np.testing.assert_allclose(small_b[:50] @ small_a, b[:50] @ a, atol=1e-8)
    np.testing.assert_allclose(small_b.T @ small_b, np.diag(s), atol=1e-8 * s[0])


def test_rounding_is_no_update() -> None:
    assert not Solver().singular_values(0.1 * np.ones((2, 4)), np.array([[1.0, -1.0], [3.0, -3.0]])).any()


@settings(max_examples=40)
@given(a=arrays(np.float64, (3, 5), elements=numbers), b=arrays(np.float64, (4, 3), elements=numbers))
def test_shares_rise_to_one_whatever_the_orientation_and_scale(a: np.ndarray, b: np.ndarray) -> None:
    solver = Solver()
    s = solver.singular_values(a, b)
    assert (np.diff(s) <= 0).all()
    turned = solver.singular_values(b.T, a.T)
    tolerance = 1e-12 * (1 + np.linalg.norm(a) * np.linalg.norm(b))
    np.testing.assert_allclose(turned, s, atol=tolerance)
    np.testing.assert_allclose(solver.singular_values(a, -7.0 * b), 7 * s, atol=7 * tolerance)
    if not s.any():
        return
    kept = variance_kept(s)
    assert kept[-1] == 1.0
    assert (np.diff(kept) >= 0).all()
    assert kept[0] > 0
    np.testing.assert_allclose(variance_kept(1e-100 * s), kept, rtol=1e-12)


@settings(max_examples=40)
@given(
    a=arrays(np.float64, (3, 5), elements=numbers),
    b=arrays(np.float64, (4, 3), elements=numbers),
    rank=st.integers(1, 3),
)
def test_the_error_is_that_of_eckart_and_young(a: np.ndarray, b: np.ndarray, rank: int) -> None:
    small_a, small_b, s = Solver().truncate(a, b, rank)
    error = np.linalg.norm(b @ a - small_b @ small_a)
    tolerance = 1e-9 * (1 + np.linalg.norm(a) * np.linalg.norm(b))
    assert error == pytest.approx(np.sqrt(np.square(s[rank:]).sum()), abs=tolerance)
    assert np.linalg.norm(small_a) == pytest.approx(np.linalg.norm(small_b), abs=np.sqrt(tolerance))


def test_cpu_needs_no_torch_and_a_device_that_is_not_there_is_refused() -> None:
    assert type(solver_for("cpu")) is Solver
    pytest.importorskip("torch")
    with pytest.raises(ConfigError) as caught:
        solver_for("gpu:99")
    assert caught.value.codes == ["squeeze.bad-device"]
