"""The pacer on a simulated backend of known law: where it settles, what it never does, and what it survives."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from retrain.kernel.config.plugin_tables import BackpressureTable
from retrain.kernel.contracts.views import PaceView
from retrain.run.backpressure import Scaling, UslPacer

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

    def __post_init__(self) -> None:
        self._random = np.random.default_rng(self.seed)

    def step(self, step: int, batch_size: int, *, has_trained: bool = True) -> PaceView:
        p = batch_size * self.group_size
        if batch_size > self.fits:
            self.failures.append(batch_size)
            return PaceView(step=step, batch_size=batch_size, group_size=self.group_size, out_of_memory=True)
        seconds = p * LENGTH / self.law.throughput(p) * math.exp(self.noise * self._random.standard_normal())
        view = PaceView(step=step, batch_size=batch_size, group_size=self.group_size, has_trained=has_trained)
        return replace(view, sampled_tokens=p * LENGTH, step_time_s=seconds)


def law(peak: float, sigma: float = 0.05) -> Scaling:
    return Scaling(sigma=sigma, kappa=(1.0 - sigma) / peak**2, rate=100.0)


def pacer_for(machine: Machine, *, batch_size: int = 8, **keys: float) -> UslPacer:
    return UslPacer(BackpressureTable(**keys), batch_size=batch_size, group_size=machine.group_size)  # type: ignore[arg-type]


def drive(pacer: UslPacer, machine: Machine, steps: int = STEPS, *, first: int = 0) -> list[int]:
    """The batch sizes that were used, one per finished step; every invariant is checked on the way."""
    used: list[int] = []
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


def check_decision(pacer: UslPacer, before: int) -> None:
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
def test_it_settles_within_a_tenth_of_the_target(sigma: float, peak: float, group_size: int, start: int) -> None:
    machine = Machine(law(peak * group_size, sigma), group_size=group_size)
    target = 0.85 * peak  # in prompts
    assume(start > target or start < 0.5 * target)  # anything between is held, by design
    batch_size = drive(pacer_for(machine, batch_size=start), machine)[-1]
    assert batch_size <= target * 1.001
    assert batch_size >= min(0.9 * target, target - 1.001)  # whole prompts: one is the finest step there is


@pytest.mark.long
@given(sigma=st.floats(0.0, 0.3), peak=st.floats(6.0, 50.0), seed=st.integers(0, 10**6), noise=st.floats(0.0, 0.1))
@settings(max_examples=60)
def test_noise_breaks_no_rule(sigma: float, peak: float, seed: int, noise: float) -> None:
    machine = Machine(law(peak * 8, sigma), group_size=8, noise=noise, seed=seed)
    used = drive(pacer_for(machine, batch_size=1), machine)
    assert all(1 <= size <= 64 for size in used)


def settled(noise: float, warmup_steps: int) -> tuple[list[float], list[float]]:
    """Over 200 machines: the distance from the target, and the throughput as a share of the target's."""
    distances, shares = [], []
    for seed in range(200):
        random = np.random.default_rng(seed)
        peak, group_size = random.uniform(10.0, 50.0), int(random.choice([1, 4, 16]))
        machine = Machine(law(peak * group_size), group_size=group_size, noise=noise, seed=seed)
        pacer = pacer_for(machine, batch_size=int(random.choice([1, 64])), warmup_steps=warmup_steps)
        batch_size, target = drive(pacer, machine)[-1], 0.85 * peak
        distances.append(abs(batch_size - target) / target)
        shares.append(machine.law.throughput(batch_size * group_size) / machine.law.throughput(target * group_size))
    return distances, shares


@pytest.mark.long
def test_the_peak_is_flat_so_noise_moves_the_place_and_hardly_the_throughput() -> None:
    distances, _ = settled(noise=0.01, warmup_steps=20)
    assert np.mean(np.asarray(distances) <= 0.1) >= 0.9
    _, shares = settled(noise=0.05, warmup_steps=10)
    assert min(shares) >= 0.95


@pytest.mark.long
@given(
    sigma=st.floats(0.0, 0.3),
    peak=st.floats(4.0, 200.0),
    fits=st.integers(1, 70),
    noise=st.floats(0.0, 0.05),
    start=st.integers(1, 64),
)
@settings(max_examples=100)
def test_it_lives_with_a_ceiling_of_memory(sigma: float, peak: float, fits: int, noise: float, start: int) -> None:
    machine = Machine(law(peak, sigma), noise=noise, fits=fits)
    used = drive(pacer_for(machine, batch_size=start), machine)
    assert max(used) <= fits
    assert len(machine.failures) <= 7, "each failure at least halves the sizes that are tried"
    assert len(set(machine.failures)) == len(machine.failures), "what did not fit is not tried again"


def test_the_ceiling_is_the_largest_size_that_worked() -> None:
    machine = Machine(Scaling(sigma=0.0, kappa=0.0, rate=10.0), fits=50)
    pacer = pacer_for(machine)
    used = drive(pacer, machine)
    assert machine.failures == [64]
    assert used[-1] == 32
    assert pacer.metrics()["bp_ceiling"] == 32
    machine = Machine(Scaling(sigma=0.0, kappa=0.0, rate=10.0), fits=40)
    assert drive(pacer_for(machine, max_batch_size=48), machine)[-1] == 32, "half of 48 would be less than what worked"


def test_out_of_memory_at_the_smallest_size_leaves_nothing_to_try() -> None:
    machine = Machine(law(30.0), fits=1)
    pacer = pacer_for(machine, min_batch_size=2, warmup_steps=0)
    assert pacer.batch_size(0) == 8
    for _ in range(4):
        pacer.observe(machine.step(0, pacer.batch_size(0)))
    assert pacer.batch_size(0) == 2  # the loop sees that nothing smaller came, and lets the error out


def test_a_system_that_scales_for_ever_grows_to_the_maximum_and_one_without_gain_shrinks() -> None:
    for sigma in (0.0, 0.05):
        machine = Machine(Scaling(sigma=sigma, kappa=0.0, rate=100.0))
        for start in (8, 48):
            assert drive(pacer_for(machine, batch_size=start, max_batch_size=48), machine)[-1] == 48
    machine = Machine(Scaling(sigma=1.2, kappa=0.01, rate=100.0))
    assert drive(pacer_for(machine, min_batch_size=2), machine)[-1] == 2


def test_the_sweep_doubles_stays_in_its_bounds_and_returns_to_the_configured_size() -> None:
    machine = Machine(law(12.0))
    used = drive(pacer_for(machine, batch_size=8), machine)
    assert used[:10] == [1, 2, 4, 8, 16, 32, 64, 1, 2, 4]
    assert used[10:] == [8] * (STEPS - 10)  # 8 lies between half the target of 10.2 and the target
    bounded = drive(pacer_for(machine, min_batch_size=3, max_batch_size=20), machine)
    assert bounded[:10] == [3, 4, 8, 16, 20, 3, 4, 8, 16, 20]


def test_one_size_alone_is_held() -> None:
    machine = Machine(law(30.0))
    assert set(drive(pacer_for(machine, warmup_steps=0), machine)) == {8}
    assert set(drive(pacer_for(machine, min_batch_size=5, max_batch_size=5), machine)) == {5}


def test_steps_without_training_move_the_sweep_and_teach_nothing() -> None:
    machine, pacer = Machine(law(12.0)), pacer_for(Machine(law(12.0)), batch_size=64)
    for step in range(30):
        pacer.observe(machine.step(step, pacer.batch_size(step), has_trained=False))
    assert pacer.batch_size(30) == 64
    assert pacer.state()["samples"] == []
    assert dict(pacer.metrics()) == {"bp_warmup": False, "bp_action": "hold", "bp_regime": "unknown"}


def test_longer_answers_are_not_read_as_contention() -> None:
    machine = Machine(Scaling(sigma=0.0, kappa=0.0, rate=100.0))
    pacer = pacer_for(machine, batch_size=64)
    drive(pacer, machine, 20)
    for step in range(20, 60):  # four times the tokens, each at a third of the speed
        view = machine.step(step, pacer.batch_size(step))
        pacer.observe(replace(view, sampled_tokens=view.sampled_tokens * 4, step_time_s=view.step_time_s * 12))
    assert pacer.batch_size(60) == 64


@settings(max_examples=25)
@given(st.integers(0, 30), st.sampled_from([10**9, 20]))
def test_a_restored_pacer_continues_like_the_original(at: int, fits: int) -> None:
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


def test_the_metrics_are_those_of_the_page() -> None:
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


def test_the_roofline_names_the_regime_and_changes_no_decision() -> None:
    machine = Machine(law(30.0))
    plain, hinted = pacer_for(machine), pacer_for(machine, peak_gflops=1000.0, peak_bw_gb_s=100.0)
    assert drive(plain, machine) == drive(hinted, machine)
    assert hinted.metrics()["bp_regime"] in {"memory_bound", "compute_bound"}
