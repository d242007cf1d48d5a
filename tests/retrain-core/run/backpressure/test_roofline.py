"""The roofline, and the names of a run's regimes on the curve."""

from __future__ import annotations

import math

import pytest

from retrain.run.backpressure import Roofline, regime

H200 = Roofline(peak_gflops=989e3, peak_bw_gb_s=4.8e3)


def test_the_ridge_of_an_h200_is_at_206_sequences() -> None:
    assert H200.ridge == pytest.approx(206.041667)


def test_below_the_ridge_memory_is_the_limit() -> None:
    assert H200.bound(206) == "memory_bound"
    assert H200.bound(207) == "compute_bound"


def test_past_the_peak_is_retrograde_whatever_the_roofline_says() -> None:
    assert regime(31, 30.0, underused_below=12.0, roofline=H200) == "retrograde"
    assert regime(30, 30.0, underused_below=12.0, roofline=H200) == "memory_bound"


def test_without_a_roofline_the_band_decides() -> None:
    assert regime(11, 30.0, underused_below=12.0, roofline=None) == "underused"
    assert regime(12, 30.0, underused_below=12.0, roofline=None) == "optimal"
    assert regime(10**9, math.inf, underused_below=12.0, roofline=None) == "optimal"
