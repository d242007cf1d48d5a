"""The pacer on a simulated backend of known law, its window, the fit of the law, and the roofline."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from retrain.kernel.config.plugin_tables import BackpressureTable
from retrain.kernel.contracts.views import PaceView
from retrain.run.backpressure import (
    MAX_SAMPLES,
    UNBOUNDED,
    Roofline,
    Sample,
    Scaling,
    UslPacer,
    Window,
    fit_usl,
    regime,
)

LENGTH = 40  # tokens per completion
STEPS = 60


@dataclass
class Machine:
    """A backend of a known law: at most `fits` prompts fit in memory, measured times scatter by the factor e^noise."""

    law: Scaling
    group_size: int = 1
    noise: float = 0.0
    fits: int = 10**9
    seed: int = 0
    failures: list[int] = field(default_factory=list)

    def __post_init__(self):
        self._random = np.random.default_rng(self.seed)

    def step(self, step, batch_size, *, has_trained=True):
        p = batch_size * self.group_size
        if batch_size > self.fits:
            self.failures.append(batch_size)
            return PaceView(step=step, batch_size=batch_size, group_size=self.group_size, out_of_memory=True)
        seconds = p * LENGTH / self.law.throughput(p) * math.exp(self.noise * self._random.standard_normal())
        view = PaceView(step=step, batch_size=batch_size, group_size=self.group_size, has_trained=has_trained)
        return replace(view, sampled_tokens=p * LENGTH, step_time_s=seconds)


def law(peak, sigma=0.05):
    return Scaling(sigma=sigma, kappa=(1.0 - sigma) / peak**2, rate=100.0)


def pacer_for(machine, *, batch_size=8, **keys):
    return UslPacer(BackpressureTable(**keys), batch_size=batch_size, group_size=machine.group_size)


def drive(pacer, machine, steps=STEPS, *, first=0):
    """The batch sizes that were used, one per finished step; every invariant is checked on the way."""
    used = []
    for step in range(first, first + steps):
        while True:
            batch_size = pacer.batch_size(step)
            assert pacer.batch_size(step) == batch_size, "asking changes nothing"
            view = machine.step(step, batch_size)
            before = pacer.state()["batch_size"]
            pacer.observe(view)
            check_decision(pacer, before)
            if not view.out_of_memory:
                break
            assert pacer.batch_size(step) < batch_size, "a step that did not fit is tried again with less"
        used.append(batch_size)
        assert all(math.isfinite(v) for v in pacer.metrics().values() if isinstance(v, float))
    return used


def check_decision(pacer, before):
    after, action = pacer.state()["batch_size"], pacer.metrics()["bp_action"]
    assert (action != "throttle") or after <= before
    assert (action != "increase") or after > before
    assert (action != "hold") or after == before


@pytest.mark.long
@given(
    sigma=st.floats(0.0, 0.4),
    peak=st.floats(3.0, 70.0),
    group_size=st.sampled_from([1, 2, 4, 8, 16]),
    start=st.sampled_from([1, 64]),
)
@settings(max_examples=150)
def test_it_settles_within_a_tenth_of_the_target(sigma, peak, group_size, start):
    machine = Machine(law(peak * group_size, sigma), group_size=group_size)
    target = 0.85 * peak  # in prompts
    assume(start > target or start < 0.5 * target)  # anything between is held, by design
    batch_size = drive(pacer_for(machine, batch_size=start), machine)[-1]
    assert batch_size <= target * 1.001
    assert batch_size >= min(0.9 * target, target - 1.001)  # whole prompts: one is the finest step there is


@pytest.mark.long
@given(
    sigma=st.floats(0.0, 0.3),
    peak=st.floats(4.0, 200.0),
    fits=st.integers(1, 70),
    noise=st.floats(0.0, 0.05),
    start=st.integers(1, 64),
)
@settings(max_examples=100)
def test_it_lives_with_a_ceiling_of_memory(sigma, peak, fits, noise, start):
    machine = Machine(law(peak, sigma), noise=noise, fits=fits)
    used = drive(pacer_for(machine, batch_size=start), machine)
    assert max(used) <= fits
    assert len(machine.failures) <= 7, "each failure at least halves the sizes that are tried"
    assert len(set(machine.failures)) == len(machine.failures), "what did not fit is not tried again"


def test_the_ceiling_is_the_largest_size_that_worked():
    machine = Machine(Scaling(sigma=0.0, kappa=0.0, rate=10.0), fits=50)
    pacer = pacer_for(machine)
    used = drive(pacer, machine)
    assert machine.failures == [64]
    assert used[-1] == 32
    assert pacer.metrics()["bp_ceiling"] == 32
    machine = Machine(Scaling(sigma=0.0, kappa=0.0, rate=10.0), fits=40)
    assert drive(pacer_for(machine, max_batch_size=48), machine)[-1] == 32, "half of 48 would be less than what worked"
    machine = Machine(law(30.0), fits=1)
    pacer = pacer_for(machine, min_batch_size=2, warmup_steps=0)
    assert pacer.batch_size(0) == 8
    for _ in range(4):
        pacer.observe(machine.step(0, pacer.batch_size(0)))
    assert pacer.batch_size(0) == 2  # the loop sees that nothing smaller came, and lets the error out


def test_the_sweep_stays_in_its_bounds_and_ends_where_the_law_says():
    machine = Machine(law(12.0))
    used = drive(pacer_for(machine, batch_size=8), machine)
    assert used[:10] == [1, 2, 4, 8, 16, 32, 64, 1, 2, 4]
    assert used[10:] == [8] * (STEPS - 10)  # 8 lies between half the target of 10.2 and the target
    bounded = drive(pacer_for(machine, min_batch_size=3, max_batch_size=20), machine)
    assert bounded[:10] == [3, 4, 8, 16, 20, 3, 4, 8, 16, 20]
    for sigma in (0.0, 0.05):
        machine = Machine(Scaling(sigma=sigma, kappa=0.0, rate=100.0))
        for start in (8, 48):
            assert drive(pacer_for(machine, batch_size=start, max_batch_size=48), machine)[-1] == 48
    machine = Machine(Scaling(sigma=1.2, kappa=0.01, rate=100.0))
    assert drive(pacer_for(machine, min_batch_size=2), machine)[-1] == 2
    machine = Machine(law(30.0))
    assert set(drive(pacer_for(machine, warmup_steps=0), machine)) == {8}
    assert set(drive(pacer_for(machine, min_batch_size=5, max_batch_size=5), machine)) == {5}


def test_steps_without_training_and_longer_answers_teach_nothing():
    machine, pacer = Machine(law(12.0)), pacer_for(Machine(law(12.0)), batch_size=64)
    for step in range(30):
        pacer.observe(machine.step(step, pacer.batch_size(step), has_trained=False))
    assert pacer.batch_size(30) == 64
    assert pacer.state()["samples"] == []
    assert dict(pacer.metrics()) == {"bp_warmup": False, "bp_action": "hold", "bp_regime": "unknown"}
    machine = Machine(Scaling(sigma=0.0, kappa=0.0, rate=100.0))
    pacer = pacer_for(machine, batch_size=64)
    drive(pacer, machine, 20)
    for step in range(20, 60):  # four times the tokens, each at a third of the speed
        view = machine.step(step, pacer.batch_size(step))
        pacer.observe(replace(view, sampled_tokens=view.sampled_tokens * 4, step_time_s=view.step_time_s * 12))
    assert pacer.batch_size(60) == 64


@settings(max_examples=25)
@given(st.integers(0, 30), st.sampled_from([10**9, 20]))
def test_a_restored_pacer_continues_like_the_original(at, fits):
    machine = Machine(law(40.0, 0.1), fits=fits)
    one = pacer_for(machine)
    drive(one, machine, at)
    other = pacer_for(machine)
    other.restore(json.loads(json.dumps(one.state(), allow_nan=False)))
    assert other.state() == one.state()
    assert other.batch_size(at) == one.batch_size(at)
    narrower = pacer_for(machine, max_batch_size=6)  # bounds that have changed since hold
    narrower.restore(one.state())
    assert narrower.batch_size(at) <= 6
    if at > 1:
        assert other.metrics() == one.metrics()
    assert drive(other, machine, 40, first=at)[-1] == drive(one, machine, 40, first=at)[-1]


def test_the_metrics_are_those_of_the_page_and_the_roofline_decides_nothing():
    machine = Machine(law(30.0), group_size=2)
    pacer = pacer_for(machine, batch_size=64)
    pacer.observe(machine.step(0, pacer.batch_size(0)))
    assert dict(pacer.metrics()) == {"bp_warmup": True, "bp_action": "hold", "bp_regime": "warmup"}
    drive(pacer, machine, 20, first=1)
    metrics = pacer.metrics()
    names = {"warmup", "action", "regime", "p_star", "sigma", "kappa", "utilization", "throughput"}
    assert {f"bp_{name}" for name in names} == set(metrics)
    assert metrics["bp_p_star"] == pytest.approx(30.0, rel=1e-6)
    assert metrics["bp_utilization"] == pytest.approx(24 / 30, rel=1e-6)
    assert metrics["bp_regime"] == "optimal"
    machine = Machine(law(30.0))
    plain, hinted = pacer_for(machine), pacer_for(machine, peak_gflops=1000.0, peak_bw_gb_s=100.0)
    assert drive(plain, machine) == drive(hinted, machine)
    assert hinted.metrics()["bp_regime"] in {"memory_bound", "compute_bound"}


def sample(p, throughput=10.0, mean_tokens=50.0):
    return Sample(p=p, throughput=throughput, mean_tokens=mean_tokens)


def test_the_window_keeps_the_sweep_and_leaves_other_lengths_out():
    window = Window()
    for p in (1, 2, 4, 8):
        window.add(sample(p))
    for number in range(500):
        window.add(sample(16, throughput=float(number)))
    assert {each.p for each in window.samples} == {1, 2, 4, 8, 16}
    assert len(window.samples) == MAX_SAMPLES
    kept = [each.throughput for each in window.samples if each.p == 16]
    assert kept == [float(number) for number in range(404, 500)]
    window = Window([sample(1, mean_tokens=40.0), sample(2, mean_tokens=100.0), sample(4, mean_tokens=210.0)])
    assert window.comparable(100.0) == [(2.0, 10.0)]
    assert window.comparable(80.0) == [(1.0, 10.0), (2.0, 10.0)]


@given(st.lists(st.tuples(st.integers(1, 6), st.floats(0.1, 1e6), st.floats(0.5, 1e4)), max_size=250))
def test_the_window_is_bounded_and_survives_json(rows):
    window = Window()
    for p, throughput, length in rows:
        window.add(sample(p, throughput, length))
        assert window.samples[-1].p == p
    assert len(window.samples) <= MAX_SAMPLES
    assert {each.p for each in window.samples} == {p for p, _, _ in rows}
    pacer = UslPacer(BackpressureTable(), batch_size=1, group_size=1)
    pacer.restore({**pacer.state(), "samples": json.loads(json.dumps(window.state()))})
    assert pacer.state()["samples"] == window.state()


SIZES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
NO_CROSSTALK = (100.0, 190.476190, 347.826087, 592.592593, 914.285714, 1254.901961, 1542.168675)
NOISY = (98.0, 188.0, 355.0, 600.0, 870.0, 1010.0, 880.0)
SUPERLINEAR = (100.0, 205.0, 420.0, 850.0, 1700.0, 3300.0, 6400.0)


def fitted(x):
    return fit_usl(list(zip(SIZES, x, strict=True)))


def test_the_published_curves_yield_the_published_numbers():
    fit = fitted(NOISY)
    assert fit.sigma == pytest.approx(0.039186, abs=1e-6)
    assert fit.kappa == pytest.approx(0.000921, abs=1e-6)
    assert fit.rate == pytest.approx(98.760992, abs=1e-5)
    assert fit.p_star == pytest.approx(32.295413, abs=1e-5)
    fit = fitted(SUPERLINEAR)
    assert fit.sigma == 0.0
    assert fit.kappa == pytest.approx(3.87199e-5, abs=1e-9)
    flat = fitted(NO_CROSSTALK)
    assert (flat.kappa, flat.p_star > 1e4) == (pytest.approx(0.0, abs=1e-10), True)
    assert Scaling(sigma=0.05, kappa=0.0, rate=1.0).p_star == UNBOUNDED
    for sigma, kappa in ((1.0, 0.0), (1.5, 0.1), (0.5, 3.0)):
        assert Scaling(sigma=sigma, kappa=kappa, rate=1.0).p_star == 1.0


def test_two_sizes_and_what_is_no_measurement_yield_no_fit():
    bad = [(4.0, throughput) for throughput in (math.nan, math.inf, 0.0, -1.0)]
    for third in ((1.0, 5.0), (0.0, 5.0), (math.inf, 5.0), *bad):
        assert fit_usl([(1.0, 5.0), (2.0, 9.0), third] * 9) is None, third


@given(
    sigma=st.floats(0.0, 0.9),
    peak=st.floats(2.0, 5000.0),
    rate=st.floats(1e-3, 1e7),
    group=st.integers(1, 512),
    relative=st.booleans(),
)
def test_any_law_is_found_again_in_any_unit(sigma, peak, rate, group, relative):
    truth = Scaling(sigma=sigma, kappa=(1.0 - sigma) / peak**2, rate=rate)
    samples = [(p * group, truth.throughput(p * group)) for p in SIZES]
    random.Random(0).shuffle(samples)
    fit = fit_usl(samples, relative=relative)
    assert [fit.throughput(p) for p, _ in samples] == pytest.approx([x for _, x in samples], rel=1e-4)
    if group <= peak <= 64 * group:
        assert fit.p_star == pytest.approx(peak, rel=1e-3)


@given(st.lists(st.tuples(st.floats(1.0, 1e6), st.floats(1e-6, 1e12)), min_size=3, max_size=40), st.booleans())
def test_no_measurement_yields_an_impossible_law(samples, relative):
    fit = fit_usl(samples, relative=relative)
    if fit is not None:
        assert 0.0 < fit.rate < math.inf
        assert 0.0 <= fit.sigma < math.inf
        assert 0.0 <= fit.kappa < math.inf
        assert fit.p_star >= 1.0


def test_the_ridge_of_an_h200_is_at_206_sequences_and_below_it_memory_is_the_limit():
    h200 = Roofline(peak_gflops=989e3, peak_bw_gb_s=4.8e3)
    assert h200.ridge == pytest.approx(206.041667)
    assert (h200.bound(206), h200.bound(207)) == ("memory_bound", "compute_bound")
    assert regime(31, 30.0, underused_below=12.0, roofline=h200) == "retrograde", "whatever the roofline says"
    assert regime(30, 30.0, underused_below=12.0, roofline=h200) == "memory_bound"
    for p, peak, wanted in ((11, 30.0, "underused"), (12, 30.0, "optimal"), (10**9, math.inf, "optimal")):
        assert regime(p, peak, underused_below=12.0, roofline=None) == wanted  # the band decides
