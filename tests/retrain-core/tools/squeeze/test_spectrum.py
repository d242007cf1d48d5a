"""Singular values, best approximations, the share V(k), the recommended rank, and their table."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrain.squeeze import analyze_adapter
from retrain.tools.squeeze.job import NO_PROMISE, analysis_lines
from retrain.tools.squeeze.spectrum import BLOCK_ROWS, Solver, ranks_to_test, solver_for, variance_kept
from tests.kit.problems import refused

SOLVERS = ["numpy", "torch"]
Factors = tuple[np.ndarray, np.ndarray]
Random = Callable[..., Factors]
Make = Callable[..., Path]
FactorsOf = Callable[..., Factors]
FALLING = [1.0, 0.1, 0.05, 0.01]
numbers = st.floats(-10, 10, allow_nan=False, width=32)
MATRIX_A, MATRIX_B = (arrays(np.float64, shape, elements=numbers) for shape in ((3, 5), (4, 3)))


@pytest.fixture(params=SOLVERS)
def solver(request: pytest.FixtureRequest) -> Solver:
    if request.param == "numpy":
        return Solver()
    pytest.importorskip("torch")
    from retrain.tools.squeeze.spectrum import TorchSolver

    return TorchSolver("cpu")


def test_the_documented_singular_values_and_shares(solver: Solver, documented_factors: Factors) -> None:
    a, b = documented_factors
    s = solver.singular_values(a, b)
    np.testing.assert_allclose(s, [4.215848, 3.174673, 2.031152, 0.0], atol=5e-7)
    assert s[3] == 0.0
    np.testing.assert_allclose(variance_kept(s), [0.555809, 0.870985, 1.0, 1.0], atol=5e-7)
    for values, wanted in (
        ([4.0, 3.0, 2.0, 1.0], [0.533333, 0.833333, 0.966667, 1.0]),
        (FALLING, [0.987557, 0.997432, 0.999901, 1.0]),
        ([1e-200, 0.0], [1.0, 1.0]),
        ([1e200, 1e200], [0.5, 1.0]),
    ):
        np.testing.assert_allclose(variance_kept(np.array(values)), wanted, atol=5e-7)


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
def test_rank_above_shape_is_filled_with_zeros(inner: int, outer: int, solver: Solver, random_factors: Random) -> None:
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
    # Rounding is no update.
    assert not Solver().singular_values(0.1 * np.ones((2, 4)), np.array([[1.0, -1.0], [3.0, -3.0]])).any()


@settings(max_examples=40)
@given(a=MATRIX_A, b=MATRIX_B, rank=st.integers(1, 3))
def test_shares_rise_to_one_and_the_error_is_that_of_eckart_and_young(a: np.ndarray, b: np.ndarray, rank: int) -> None:
    solver = Solver()
    small_a, small_b, s = solver.truncate(a, b, rank)
    error, loose = np.linalg.norm(b @ a - small_b @ small_a), 1e-9 * (1 + np.linalg.norm(a) * np.linalg.norm(b))
    assert error == pytest.approx(np.sqrt(np.square(s[rank:]).sum()), abs=loose)
    assert np.linalg.norm(small_a) == pytest.approx(np.linalg.norm(small_b), abs=np.sqrt(loose))
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


def test_cpu_needs_no_torch_and_a_device_that_is_not_there_is_refused() -> None:
    assert type(solver_for("cpu")) is Solver
    pytest.importorskip("torch")
    assert refused(solver_for, "gpu:99") == ["squeeze.bad-device"]


def test_the_mean_hides_the_worst_layer_and_both_are_told(make_adapter: Make, two_layers: dict[str, Factors]) -> None:
    analysis = analyze_adapter(make_adapter(two_layers), min_variance_retention=0.9)
    one, two, four = analysis.rows
    assert [one.mean_variance, two.mean_variance] == pytest.approx([0.771683, 0.934209], abs=5e-7)
    assert [one.energy_variance, two.energy_variance] == pytest.approx([0.569061, 0.874866], abs=5e-7)
    assert (two.min_variance, two.worst_module) == (pytest.approx(0.870985, abs=5e-7), "a")
    assert two.max_variance == pytest.approx(0.997432, abs=5e-7)
    assert (four.mean_variance, four.min_variance, four.max_variance, four.energy_variance) == (1.0, 1.0, 1.0, 1.0)
    assert (analysis.source_rank, analysis.recommended_rank, analysis.layers[0].rank_needed) == (4, 2, 3)


def test_energy_counts_scales_and_a_smaller_rank_keeps_all(make_adapter: Make, factors_of: FactorsOf) -> None:
    layers = {"a": factors_of([4.0, 3.0, 2.0, 1.0]), "b": factors_of(FALLING)}
    row = analyze_adapter(make_adapter(layers, lora_alpha=4, alpha_pattern={"b": 400})).rows[0]
    energy = 1e4 * sum(s * s for s in FALLING)
    assert row.energy_variance == pytest.approx((16 + 1e4) / (30 + energy))
    assert row.mean_variance == pytest.approx((16 / 30 + 1e4 / energy) / 2)
    layers = {"a": factors_of([1.0] * 8), "b": factors_of([1.0, 1.0])}
    analysis = analyze_adapter(make_adapter(layers, "ranks", rank_pattern={"b": 2}))
    assert analysis.source_rank == 8
    assert [row.mean_variance for row in analysis.rows] == pytest.approx([0.3125, 0.625, 0.75, 1.0])


def test_an_idle_layer_counts_in_no_mean(make_adapter: Make, factors_of: FactorsOf, idle_layer: Factors) -> None:
    analysis = analyze_adapter(make_adapter({"a": factors_of([4.0, 3.0, 2.0, 1.0]), "b": idle_layer}))
    assert (analysis.num_without_update, analysis.learned_nothing) == (1, False)
    assert [row.mean_variance for row in analysis.rows] == pytest.approx([16 / 30, 25 / 30, 1.0])
    assert analysis.layers[1].as_data()["rank_needed"] is None
    idle = analyze_adapter(make_adapter({"a": idle_layer, "b": idle_layer}, "idle"))
    assert (idle.learned_nothing, idle.recommended_rank, idle.rows) == (True, None, ())
    lines = analysis_lines(idle)
    assert "Layers without an update, left out of every mean: 2" in lines
    assert (lines[-1][:17], any("Rank " in line for line in lines)) == ("No update learned", False)


def test_no_rank_or_all_of_the_variance(make_adapter: Make, factors_of: FactorsOf, documented_factors: Factors) -> None:
    analysis = analyze_adapter(make_adapter({"a": factors_of([1.0] * 4)}), target_ranks=[1, 2])
    assert (analysis.recommended_rank, analysis.learned_nothing) == (None, False)
    whole = analyze_adapter(
        make_adapter({"a": documented_factors}, "b"), target_ranks=[2, 3, 4], min_variance_retention=1.0, source_rank=4
    )
    assert (whole.recommended_rank, whole.source_rank) == (3, 4)
    tested = {1: [1], 4: [1, 2, 4], 6: [1, 2, 4, 6], 128: [1, 2, 4, 8, 16, 32, 64, 128]}
    assert {source: ranks_to_test(source, []) for source in tested} == tested
    assert ranks_to_test(8, [100, 3, 3, 1]) == [1, 3, 8]


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        *(("squeeze.bad-share", {"min_variance_retention": value}) for value in (0.0, 95.0, float("nan"))),
        ("squeeze.bad-rank", {"target_ranks": [4, 0]}),
        ("squeeze.source-rank", {"source_rank": 8}),
    ],
)
def test_arguments_that_make_no_sense(code: str, arguments: Any, make_adapter: Make, two_layers: Any) -> None:
    assert refused(analyze_adapter, make_adapter(two_layers), **arguments) == [code]


@pytest.mark.parametrize(
    ("code", "size", "bad", "alpha"),
    [
        ("squeeze.weights-not-finite", 1.0, np.nan, 4.0),
        ("squeeze.weights-not-finite", 1.0, np.inf, 4.0),
        ("squeeze.factors-too-large", 1e160, 0.0, 4.0),
        ("squeeze.factors-too-large", 1e80, 0.0, 4.0),
        ("squeeze.update-too-large", 1e69, 0.0, 1e30),
    ],
)
def test_large_numbers_are_measured_and_too_large_ones_errors(
    code: str, size: float, bad: float, alpha: float, make_adapter: Make, documented_factors: Factors
) -> None:
    a, b = (size * factor for factor in documented_factors)
    b[0, 0] = bad or b[0, 0]
    assert refused(analyze_adapter, make_adapter({"q": (a, b)}, lora_alpha=alpha)) == [code]
    a, b = documented_factors
    for name, size in (("large", 1e60), ("small", 1e-100)):
        row = analyze_adapter(make_adapter({"q": (size * a, size * b)}, name)).rows[0]
        assert (row.mean_variance, row.energy_variance) == pytest.approx((0.555809, 0.555809), abs=5e-7)


def test_nothing_heavy_is_imported_for_it(make_adapter: Make, documented_factors: Factors) -> None:
    folder = make_adapter({"q": documented_factors})
    program = (
        "import sys, retrain.squeeze\n"
        "assert not {'numpy', 'safetensors'} & set(sys.modules)\n"
        f"assert retrain.squeeze.analyze_adapter({str(folder)!r}).recommended_rank == 4\n"
        "assert not {'torch', 'transformers', 'plotly', 'wandb'} & set(sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_whole_table_and_no_name_steers_the_terminal(make_adapter: Make, two_layers: dict[str, Factors]) -> None:
    folder = make_adapter({"a\x1b[2Jb": two_layers["a"], "b": two_layers["b"]})
    lines = analysis_lines(analyze_adapter(folder, min_variance_retention=0.9))
    assert lines == [
        f"LoRA-Squeeze: {folder}",
        "Threshold: 90% variance retained",
        "Source rank: 4",
        "Layers analyzed: 2",
        "",
        "  Rank  Mean Var%  Min Var%  Max Var%  Energy Var%",
        "--------------------------------------------------",
        "     1      77.17     55.58     98.76        56.91",
        "     2      93.42     87.10     99.74        87.49  <--",
        "     4     100.00    100.00    100.00       100.00",
        "",
        "Recommended rank: 2 (>= 90% variance retained)",
        "Least variance is kept in a\ufffd[2Jb: 87.10%",
        NO_PROMISE,
    ]
