"""The fit of the scalability law: the published vectors, its clamps, and that no unit or order matters."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.run.backpressure import UNBOUNDED, Roofline, Scaling, fit_usl, regime

P = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
EXACT = (100.0, 190.114068, 344.234079, 568.990043, 804.020101, 903.444382, 782.204840)
NO_CROSSTALK = (100.0, 190.476190, 347.826087, 592.592593, 914.285714, 1254.901961, 1542.168675)
NOISY = (98.0, 188.0, 355.0, 600.0, 870.0, 1010.0, 880.0)
SUPERLINEAR = (100.0, 205.0, 420.0, 850.0, 1700.0, 3300.0, 6400.0)


def fitted(x: tuple[float, ...], *, relative: bool = False) -> Scaling:
    fit = fit_usl(list(zip(P, x, strict=True)), relative=relative)
    assert fit is not None
    return fit


@pytest.mark.parametrize("relative", [False, True])
def test_an_exact_curve_is_found_again(relative: bool) -> None:
    fit = fitted(EXACT, relative=relative)
    assert (fit.sigma, fit.kappa, fit.rate) == pytest.approx((0.05, 0.001, 100.0), abs=1e-5)
    assert fit.p_star == pytest.approx(30.822070, abs=1e-4)
    assert fit.throughput(fit.p_star) == pytest.approx(903.798430, abs=1e-4)
    flat = fitted(NO_CROSSTALK, relative=relative)
    assert (flat.kappa, flat.p_star > 1e4) == (pytest.approx(0.0, abs=1e-10), True)
    assert Scaling(sigma=0.05, kappa=0.0, rate=1.0).p_star == UNBOUNDED


def test_a_noisy_curve_yields_the_published_numbers() -> None:
    fit = fitted(NOISY)
    assert fit.sigma == pytest.approx(0.039186, abs=1e-6)
    assert fit.kappa == pytest.approx(0.000921, abs=1e-6)
    assert fit.rate == pytest.approx(98.760992, abs=1e-5)
    assert fit.p_star == pytest.approx(32.295413, abs=1e-5)


def test_faster_than_linear_clamps_sigma_at_nothing() -> None:
    fit = fitted(SUPERLINEAR)
    assert fit.sigma == 0.0
    assert fit.kappa == pytest.approx(3.87199e-5, abs=1e-9)


def test_without_a_gain_from_a_second_completion_the_peak_is_one() -> None:
    for sigma, kappa in ((1.0, 0.0), (1.5, 0.1), (0.5, 3.0)):
        assert Scaling(sigma=sigma, kappa=kappa, rate=1.0).p_star == 1.0


@pytest.mark.parametrize(
    "samples",
    [
        [],
        [(1.0, 5.0)] * 50,
        [(1.0, 5.0), (2.0, 9.0)] * 9,
        [(1.0, 5.0), (2.0, 9.0), (4.0, math.nan)],
        [(1.0, 5.0), (2.0, 9.0), (4.0, math.inf)],
        [(1.0, 5.0), (2.0, 9.0), (4.0, 0.0)],
        [(1.0, 5.0), (2.0, 9.0), (4.0, -1.0)],
        [(0.0, 5.0), (2.0, 9.0), (4.0, 1.0)],
        [(math.inf, 5.0), (2.0, 9.0), (4.0, 1.0)],
        [(1.0, 100.0), (2.0, 1e-9), (3.0, 1e9), (4.0, 1e-9)],
    ],
)
def test_insufficient_samples_yield_no_fit(samples: list[tuple[float, float]]) -> None:
    fit = fit_usl(samples)
    assert fit is None or (fit.rate > 0.0 and fit.sigma >= 0.0 and fit.kappa >= 0.0)
    if len({p for p, _ in samples}) < 3:
        assert fit is None


@given(
    sigma=st.floats(0.0, 0.9),
    peak=st.floats(2.0, 5000.0),
    rate=st.floats(1e-3, 1e7),
    group=st.integers(1, 512),
    relative=st.booleans(),
)
def test_any_law_is_found_again_in_any_unit(sigma: float, peak: float, rate: float, group: int, relative: bool) -> None:
    truth = Scaling(sigma=sigma, kappa=(1.0 - sigma) / peak**2, rate=rate)
    samples = [(p * group, truth.throughput(p * group)) for p in P]
    random.Random(0).shuffle(samples)
    fit = fit_usl(samples, relative=relative)
    assert fit is not None
    assert [fit.throughput(p) for p, _ in samples] == pytest.approx([x for _, x in samples], rel=1e-4)
    if group <= peak <= 64 * group:
        assert fit.p_star == pytest.approx(peak, rel=1e-3)


@given(st.lists(st.tuples(st.floats(1.0, 1e6), st.floats(1e-6, 1e12)), min_size=3, max_size=40), st.booleans())
def test_no_measurement_yields_an_impossible_law(samples: list[tuple[float, float]], relative: bool) -> None:
    fit = fit_usl(samples, relative=relative)
    if fit is not None:
        assert 0.0 < fit.rate < math.inf
        assert 0.0 <= fit.sigma < math.inf
        assert 0.0 <= fit.kappa < math.inf
        assert fit.p_star >= 1.0


def test_the_ridge_of_an_h200_is_at_206_sequences_and_below_it_memory_is_the_limit() -> None:
    h200 = Roofline(peak_gflops=989e3, peak_bw_gb_s=4.8e3)
    assert h200.ridge == pytest.approx(206.041667)
    assert (h200.bound(206), h200.bound(207)) == ("memory_bound", "compute_bound")
    assert regime(31, 30.0, underused_below=12.0, roofline=h200) == "retrograde", "whatever the roofline says"
    assert regime(30, 30.0, underused_below=12.0, roofline=h200) == "memory_bound"


@pytest.mark.parametrize(
    ("p", "peak", "wanted"), [(11, 30.0, "underused"), (12, 30.0, "optimal"), (10**9, math.inf, "optimal")]
)
def test_without_a_roofline_the_band_decides(p: int, peak: float, wanted: str) -> None:
    assert regime(p, peak, underused_below=12.0, roofline=None) == wanted
