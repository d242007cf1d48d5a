"""Transforms, uncertainties and the SEPA schedule against their formulas; what they refuse; a resume."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose, assert_array_equal

from retrain.advantages import UncertaintyContext
from retrain.api import ControllerView, CreditError, ResumeError
from retrain_sepa.controller import SepaController
from retrain_sepa.tables import SepaTable
from retrain_sepa.transforms import amplify_planning, gtpo_weights, pool_execution, top_rho_threshold
from retrain_sepa.uncertainties import SHANNON_ENTROPY, SURPRISAL, predictive_variance, shannon_entropy, surprisal
from tests.kit.problems import codes_in, refused

U = np.array([0.2, 0.3, 1.8, 0.1, 0.9, 0.2, 2.1, 0.3, 0.1, 0.2])
PLANNING = np.isin(np.arange(10), [2, 6])
sizes = st.shared(st.integers(1, 40), key="tokens")
uncertainties = arrays(np.float64, sizes, elements=st.floats(0.0, 60.0))
some = settings(max_examples=50)


def test_pooling_of_the_worked_example():
    before = U.copy()
    pooled = pool_execution(U, PLANNING, 0.5)
    expected = [0.243750, 0.293750, 1.8, 0.193750, 0.593750, 0.243750, 2.1, 0.293750, 0.193750, 0.243750]
    assert_allclose(pooled, expected, atol=5e-7)
    assert pooled[~PLANNING].var() == pytest.approx(0.014648, abs=5e-7)
    full = gtpo_weights(pool_execution(U, PLANNING, 1.0), 0.1)
    assert_allclose(full[~PLANNING], 0.946371, atol=5e-7)
    assert_allclose(full[PLANNING], [1.190323, 1.238710], atol=5e-7)
    assert_array_equal(pool_execution(U, PLANNING, 7.0), pool_execution(U, PLANNING, 1.0))
    copied = pool_execution(U, PLANNING, -1.0)
    assert_array_equal(copied, U)
    assert not np.shares_memory(copied, U)
    assert_array_equal(pool_execution(U, np.ones(10, bool), 1.0), U)
    assert pool_execution(np.zeros(0), np.zeros(0, bool), 0.5).size == 0
    assert_array_equal(U, before)
    assert surprisal(context([1e-6])).tolist() == predictive_variance(context([1e-6])).tolist() == [0.0]
    assert shannon_entropy(context([-1.0, -1.0], [0.7, -1e-9])).tolist() == [0.7, 0.0]
    assert (SHANNON_ENTROPY.needs_entropy, SURPRISAL.needs_entropy) == (True, False)
    for kind in (surprisal, predictive_variance, shannon_entropy):  # not a number stays one
        assert np.isnan(kind(context([0.0 if kind is shannon_entropy else np.nan], [np.nan]))).all()


@pytest.mark.parametrize(
    ("function", "arguments", "code"),
    [
        (pool_execution, (U, PLANNING[:9], 0.5), "credit.wrong-mask"),
        (pool_execution, (U, PLANNING, float("nan")), "credit.bad-lambda"),
        *((amplify_planning, (np.ones(5), np.ones(n, bool), 0.2), "credit.wrong-mask") for n in (0, 1, 4, 6)),
    ],
)
def test_a_mask_or_lambda_that_does_not_fit_is_refused(function, arguments, code):
    assert refused(function, *arguments) == [code]


@some
@given(uncertainties, arrays(np.bool_, sizes), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_pooling_keeps_planning_tokens_and_means_and_shrinks_the_variance(uncertainty, planning, strength, beta):
    uncertainty = np.minimum(uncertainty, 50.0)
    pooled = pool_execution(uncertainty, planning, strength)
    assert_array_equal(pooled[planning], uncertainty[planning])
    execution = uncertainty[~planning]
    expected = strength * execution.mean() + (1 - strength) * execution if execution.size else execution
    assert_allclose(pooled[~planning], expected, atol=1e-9)
    weights = gtpo_weights(pooled, beta)
    assert weights.mean() == pytest.approx(1.0, abs=1e-9)
    if uncertainty.mean() > 1e-3:
        assert_allclose(weights[planning], gtpo_weights(uncertainty, beta)[planning], rtol=1e-9, atol=1e-12)


@some
@given(uncertainties, st.floats(0.0, 20.0))
def test_gtpo_weighs_by_uncertainty_over_its_mean(uncertainty, beta):
    bounded = np.minimum(uncertainty, 50.0)
    is_flat = bounded.mean() < 1e-7
    expected = np.ones(bounded.shape) if is_flat else np.maximum(1 + beta * (bounded / bounded.mean() - 1), 0.0)
    assert_allclose(gtpo_weights(uncertainty, beta), expected, rtol=1e-9, atol=1e-9)
    assert_allclose(gtpo_weights(np.array([0.0, 2e-7]), beta), [max(1 - beta, 0.0), 1 + beta])  # as flat as is weighted


@pytest.mark.parametrize("uncertainty", [np.full(4, 9e-8), np.zeros(4), U[:1], np.zeros(0)])
def test_without_uncertainty_or_with_one_token_weights_are_uniform(uncertainty):
    assert_allclose(gtpo_weights(uncertainty, 0.7), np.ones(len(uncertainty)), rtol=1e-15)


@pytest.mark.parametrize(
    ("alpha", "expected"), [(0.2, [1.2, -0.8, 0.5, -0.4, 0]), (1.0, [2, 0, 0.5, 0, 0]), (0.0, [1, -1, 0.5, -0.5, 0])]
)
def test_hicra_of_the_worked_example(alpha, expected):
    advantages_T = np.array([1, -1, 0.5, -0.5, 0])
    assert_allclose(amplify_planning(advantages_T, np.array([1, 1, 0, 1, 1], dtype=bool), alpha), expected)
    assert_array_equal(advantages_T, [1, -1, 0.5, -0.5, 0])


@pytest.mark.parametrize(
    ("rho", "threshold"), [(0.2, 1.8), (0.3, 0.9), (0.25, 1.8), (0.05, 2.1), (0.5, 0.3), (0.0, -np.inf), (1.0, -np.inf)]
)
def test_top_rho_of_the_worked_example(rho, threshold):
    assert top_rho_threshold([U[:4], U[4:4], U[4:]], rho) == threshold
    assert top_rho_threshold([], rho) == top_rho_threshold([np.zeros(0)], rho) == -np.inf


@some
@given(st.lists(uncertainties, min_size=1, max_size=5), st.floats(0.001, 0.999))
def test_top_rho_keeps_the_wanted_share_and_ties(drawn, rho):
    flat = np.concatenate(drawn)
    threshold = top_rho_threshold(drawn, rho)
    rank = max(1, int(np.floor(len(flat) * rho + 1e-9)))
    assert threshold in flat
    assert np.count_nonzero(flat > threshold) < rank <= np.count_nonzero(flat >= threshold)


def context(logprobs, entropies=None):
    entropies_T = None if entropies is None else np.asarray(entropies, dtype=np.float64)
    return UncertaintyContext(logprobs_T=np.asarray(logprobs, dtype=np.float64), entropies_T=entropies_T)


@settings(max_examples=50)
@given(arrays(np.float64, st.integers(0, 30), elements=st.floats(-700.0, 0.0) | st.just(-np.inf)))
def test_surprisal_is_bounded_and_predictive_variance_is_that_of_a_coin(logprobs):
    assert_allclose(surprisal(context(logprobs)), np.minimum(-logprobs, 50.0))
    p = np.exp(logprobs)
    finite = logprobs[np.isfinite(logprobs)]
    assert_allclose(predictive_variance(context(finite)), (p * (1 - p))[np.isfinite(logprobs)], atol=1e-15)


@pytest.mark.parametrize(
    ("kind", "given_", "code"),
    [
        (surprisal, context([-1.0, 0.5]), "engine.impossible-number"),
        (predictive_variance, context([-1.0, 0.5]), "engine.impossible-number"),
        (shannon_entropy, context([-1.0], [-0.5]), "engine.impossible-number"),
        (shannon_entropy, context([-1.0]), "backend.no-entropies"),
    ],
)
def test_impossible_and_missing_numbers_are_refused(kind, given_, code):
    with pytest.raises(CreditError) as caught:
        kind(given_)
    assert codes_in(caught) == [code]
    assert code.startswith("backend") or f"at token {len(given_.logprobs_T) - 1}" in str(caught.value)


def controller(**settings):
    return SepaController(SepaTable(**{"correct_rate_gate": 0.0, **settings}))


def view(step=0, rate=None, variance=None):
    return ControllerView(step=step, correct_rate=rate, execution_variance=variance)


@pytest.mark.parametrize(
    ("settings", "step", "value"),
    [
        *(({}, step, value) for step, value in ((0, 0), (50, 0), (51, 0.002), (175, 0.25), (300, 0.5), (550, 1))),
        *(({}, 900, 1), ({}, 499, 0.898), ({"steps": 50, "delay_steps": 10}, 49, 0.78)),
        *(({"steps": 0, "delay_steps": 0}, 10_000, 0), ({"steps": 10, "delay_steps": 0}, 1, 0.1)),
    ],
)
def test_the_linear_ramp(settings, step, value):
    assert controller(**settings).value(step) == pytest.approx(value)


@pytest.mark.parametrize(("ratio", "expected"), [(1, 0), (0.2, 0), (0.15, 0.25), (0.1, 0.5), (0.05, 0.75), (0, 1)])
def test_auto_is_the_larger_of_variance_rule_and_ramp(ratio, expected):
    for steps in (0, 100):
        sepa = controller(schedule="auto", steps=steps, delay_steps=0, ema_decay=0.0, warmup_steps=1)
        sepa.observe(view(variance=0.4))
        sepa.observe(view(variance=0.4 * ratio))
        assert sepa.value(60) == pytest.approx(max(expected, 0.6 if steps else 0.0))


def test_auto_fixes_its_start_after_the_warm_up_steps():
    sepa = controller(schedule="auto", steps=0, warmup_steps=3, ema_decay=0.5)
    for step, variance in enumerate([1.0, None, 3.0, math.inf, -1.0, math.nan]):
        sepa.observe(view(step, variance=variance))
        assert (sepa.state()["var_0"], sepa.value(step)) == (None, 0.0)
    sepa.observe(view(6, variance=4.0))
    assert (sepa.state()["var_0"], sepa.state()["warmup_seen"]) == (pytest.approx(3.0), 3)  # 1 -> 2 -> 3
    sepa.observe(view(7, variance=0.0))
    assert (sepa.state()["var_0"], sepa.state()["var_ema"]) == (pytest.approx(3.0), pytest.approx(1.5))
    sepa = controller(schedule="auto", steps=0, warmup_steps=1, ema_decay=0.0, correct_rate_gate=0.5)
    sepa.observe(view(0, 0.0, 0.0))
    assert (sepa.state()["var_0"], sepa.value(1)) == (1e-8, 0.0)
    sepa.observe(view(1, 0.5, 0.0))
    assert sepa.value(2) == 1.0, "without variance at the start it waits only for the gate"
    sepa = controller(correct_rate_gate=0.1, steps=100, delay_steps=0)
    for step, rate in enumerate([0.05, None, math.nan, 0.099]):
        assert sepa.value(step) == 0.0
        sepa.observe(view(step, rate))
        assert sepa.metrics() == {"sepa_gate_open": False}
    assert sepa.value(4) == 0.0
    sepa.observe(view(4, 0.1))
    assert sepa.metrics() == {"sepa_gate_open": True}
    assert sepa.value(5) == pytest.approx(0.05)  # the ramp counted on while the gate was shut
    sepa.observe(view(5, 0.0))
    assert sepa.value(6) == pytest.approx(0.06)
    saved = {"steps": 500, "schedule": "linear", "delay_steps": 50, "correct_rate_gate": 0.0, "ema_decay": 0.99}
    learnt = {"eps": 1e-8, "var_ema": None, "var_0": None, "warmup_seen": 0, "gate_open": True}
    settings = {f"sepa_{name}": value for name, value in saved.items()}
    assert controller().state() == {**settings, "sepa_var_threshold": 0.2, "sepa_warmup": 50, **learnt}
    with pytest.raises(ResumeError) as caught:
        controller(steps=10, schedule="auto").restore(controller(steps=20, schedule="linear").state())
    assert codes_in(caught) == ["resume.sepa-differs"] * 2
    assert [problem.where for problem in caught.value.problems] == ["sepa.steps", "sepa.schedule"]


observations = st.lists(st.tuples(st.none() | st.floats(0, 1), st.none() | st.floats(0, 10)), min_size=1, max_size=30)


@settings(max_examples=50)
@given(observations, st.data(), st.sampled_from(["linear", "auto"]))
def test_a_restored_controller_goes_on_as_if_never_stopped(seen, data, schedule):
    settings = {"schedule": schedule, "correct_rate_gate": 0.3, "steps": 20, "delay_steps": 2, "warmup_steps": 3}
    cut = data.draw(st.integers(0, len(seen)))
    whole, resumed = controller(**settings), controller(**settings)
    for step, (rate, variance) in enumerate(seen):
        if step == cut:
            resumed.restore(json.loads(json.dumps(whole.state())))
        expected = whole.value(step)
        assert 0.0 <= expected <= 1.0
        whole.observe(view(step, rate, variance))
        if step >= cut:
            assert resumed.value(step) == expected
            resumed.observe(view(step, rate, variance))
            assert resumed.state() == whole.state()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("var_ema", math.nan), ("var_0", -1.0), ("var_0", "1"), ("warmup_seen", 2.5), ("warmup_seen", -1)),
        ("gate_open", 1),
    ],
)
def test_a_damaged_state_is_refused_and_changes_nothing(name, value):
    sepa = controller()
    before = sepa.state()
    missing = {key: kept for key, kept in before.items() if key != name}
    for state in ({**before, name: value}, missing):
        with pytest.raises(ResumeError) as caught:
            sepa.restore(state)
        assert codes_in(caught) == ["resume.sepa-damaged"]
        assert f"sepa.{name}" in caught.value.problems[0].where
    assert sepa.state() == before
