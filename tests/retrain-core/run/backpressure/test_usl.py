"""The fit of the scalability law: the published vectors, its clamps, and that no unit or order matters."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.run.backpressure import UNBOUNDED, Scaling, fit_usl

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
    assert fit.sigma == pytest.approx(0.05, abs=1e-7)
    assert fit.kappa == pytest.approx(0.001, abs=1e-8)
    assert fit.rate == pytest.approx(100.0, abs=1e-5)
    assert fit.p_star == pytest.approx(30.822070, abs=1e-4)
    assert fit.throughput(fit.p_star) == pytest.approx(903.798430, abs=1e-4)
    assert [fit.throughput(p) for p in P] == pytest.approx(EXACT, abs=1e-4)


def test_without_crosstalk_there_is_no_peak() -> None:
    fit = fitted(NO_CROSSTALK)
    assert fit.kappa == pytest.approx(0.0, abs=1e-10)
    assert fit.p_star > 1e4
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


def test_a_large_group_moves_p_and_nothing_else() -> None:
    truth = Scaling(sigma=0.02, kappa=1e-5, rate=50.0)
    ps = [16.0 * 2**i for i in range(7)]
    fit = fit_usl([(p, truth.throughput(p)) for p in ps])
    assert fit is not None
    assert fit.p_star == pytest.approx(313.049517, rel=1e-6)
    assert 0.85 * fit.p_star == pytest.approx(266.092089, rel=1e-6)
    assert int(0.85 * fit.p_star / 16) == 16


def test_serial_work_alone_gains_nothing() -> None:
    assert Scaling(sigma=1.0, kappa=0.0, rate=1.0).p_star == 1.0
    assert Scaling(sigma=1.5, kappa=0.1, rate=1.0).p_star == 1.0
    assert Scaling(sigma=0.5, kappa=3.0, rate=1.0).p_star == 1.0


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


@given(
    st.lists(
        st.tuples(st.floats(1.0, 1e6), st.floats(1e-6, 1e12)),
        min_size=3,
        max_size=100,
    ),
    st.booleans(),
)
def test_no_measurement_yields_an_impossible_law(samples: list[tuple[float, float]], relative: bool) -> None:
    fit = fit_usl(samples, relative=relative)
    if fit is not None:
        assert math.isfinite(fit.rate)
        assert fit.rate > 0.0
        assert 0.0 <= fit.sigma < math.inf
        assert 0.0 <= fit.kappa < math.inf
        assert fit.p_star >= 1.0
