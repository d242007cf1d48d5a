"""Advantages of a group, of a step and by token, against published vectors and formulas."""

import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose
from pydantic import ValidationError

from retrain.advantages import AdvantageContext, StepAdvantageContext, TokenAdvantageContext
from retrain.api import CreditError
from retrain_sepa import advantages as sepa

EIGHT = [1, 0, 0, 1, 0, 0, 0, 0]
MIXED = [-1, 1, 0, 0.5]
STD, BESSEL = {"scale": "std", "ddof": 0}, {"scale": "std", "ddof": 1}
finite = st.floats(-1e3, 1e3)
groups = arrays(np.float64, st.integers(2, 16), elements=finite)


def max_rl(rewards):
    return sepa.maxrl_advantages(np.asarray(rewards, dtype=np.float64))


@pytest.mark.parametrize(
    ("rewards", "params", "expected"),
    [
        (EIGHT, {}, [0.75, -0.25, -0.25, 0.75, -0.25, -0.25, -0.25, -0.25]),
        (MIXED, {}, [-1.125, 0.875, -0.125, 0.375]),
        (EIGHT, STD, [1.731651, -0.577217, -0.577217, 1.731651, -0.577217, -0.577217, -0.577217, -0.577217]),
        (EIGHT, BESSEL, [1.619835, -0.539945, -0.539945, 1.619835, -0.539945, -0.539945, -0.539945, -0.539945]),
        (MIXED, STD, [-1.521072, 1.183056, -0.169008, 0.507024]),
        (MIXED, BESSEL, [-1.317311, 1.024575, -0.146368, 0.439104]),
    ],
)
def test_grpo_vectors(rewards, params, expected):
    np.testing.assert_allclose(sepa.grpo_advantages(np.array(rewards, dtype=np.float64), **params), expected, atol=5e-7)


@pytest.mark.parametrize("rewards", [[], *([value] * size for value in (0.0, 0.1, 1.0, -2.5) for size in (1, 7))])
@pytest.mark.parametrize("params", [{}, BESSEL])
def test_without_a_difference_there_are_exact_zeros(advantage, rewards, params):
    assert advantage(rewards, **params).tolist() == [0.0] * len(rewards)


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 0, 0, 0], [2.999988, -0.999996, -0.999996, -0.999996]),
        ([1, 1, 0, 0], [0.999998, 0.999998, -0.999998, -0.999998]),
        ([1] + [0] * 15, [14.999760] + [-0.999984] * 15),
        ([0.2, 0.5, 0.8, 0.5], [-0.599999, 0, 0.599999, 0]),
        ([-1, -1, 1, 0.5], [0, 0, 0, 0]),
    ],
)
def test_maxrl_vectors(rewards, expected):
    np.testing.assert_allclose(max_rl(rewards), expected, atol=6e-7)
    context = AdvantageContext(rewards_G=np.array([0.1, 0.3]), params={"eps": 0.25})
    assert sepa.maxrl().compute(context).tolist() == [0.0, 0.0]


def test_maxrl_warns_once_for_each_run(caplog):
    outside = AdvantageContext(rewards_G=np.array([0.0, 1.5]))
    with caplog.at_level(logging.WARNING, logger="retrain.credit"):
        spec = sepa.maxrl()
        spec.compute(AdvantageContext(rewards_G=np.array([0.0, 1.0])))
        assert not caplog.records
        spec.compute(outside)
        spec.compute(outside)
        assert len(caplog.records) == 1
        sepa.maxrl().compute(outside)
        assert len(caplog.records) == 2
    assert "1.5" in caplog.text


@settings(max_examples=40)
@given(groups, st.randoms(), finite)
def test_advantages_follow_a_permutation_and_those_of_grpo_are_centred_and_ignore_a_constant(rewards, random, shift):
    order = list(range(rewards.size))
    random.shuffle(order)
    np.testing.assert_allclose(
        sepa.maxrl_advantages(rewards[order]), sepa.maxrl_advantages(rewards)[order], rtol=1e-6, atol=1e-9
    )
    centred = sepa.grpo_advantages(rewards)
    np.testing.assert_allclose(sepa.grpo_advantages(rewards[order] + shift), centred[order], atol=1e-9)
    assert abs(centred.sum()) < 1e-9 * (1 + np.abs(rewards).sum())


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (sepa.GrpoParams, {"scale": "mean"}),
        (sepa.GrpoParams, {"ddof": 2}),
        (sepa.GrpoParams, {"dof": 1}),
        (sepa.MaxrlParams, {"eps": 0.0}),
        (sepa.MaxrlParams, {"eps": "small"}),
        (sepa.BaselineParams, {"weight": "samples"}),
        (sepa.GdpoParams, {"ddof": 2}),
        (sepa.GdpoParams, {"weights": {"a": "1"}}),
        *((sepa.DistillationParams, wrong) for wrong in ({"coef": 0.0}, {"discount": 1.5}, {"gamma": 1.0})),
    ],
)
def test_wrong_parameters_are_refused(model, given):
    with pytest.raises(ValidationError):
        model.model_validate(given)


STEP = [[1, 0, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]]
steps = st.lists(arrays(np.float64, st.integers(0, 6), elements=st.integers(-4, 8).map(lambda n: n / 4)), max_size=5)


def rewards(*groups):
    return [np.asarray(group, dtype=np.float64) for group in groups]


def context(*groups, lengths=None, named=None, shaping=None, given=None, **params):
    given_PG = rewards(*groups)
    return StepAdvantageContext(
        rewards_PG=given_PG,
        lengths_PG=[np.arange(1, len(r) + 1) for r in given_PG] if lengths is None else lengths,
        named_rewards_PG=[{} for _ in given_PG] if named is None else named,
        shaping_PG=[np.zeros(len(r)) for r in given_PG] if shaping is None else shaping,
        reward_weights=given or {},
        params=params,
    )


def flat(arrays_PG):
    return np.concatenate([np.zeros(0), *arrays_PG])


@settings(max_examples=40)
@given(arrays(np.float64, st.integers(0, 12), elements=st.floats(-100, 100)))
def test_rloo_compares_each_completion_with_the_others(rewards_G):
    others = [r - np.delete(rewards_G, i).mean() if rewards_G.size > 1 else 0.0 for i, r in enumerate(rewards_G)]
    np.testing.assert_allclose(sepa.rloo_advantages(rewards_G), others, atol=1e-9)


def test_reinforce_pp_baseline_vectors():
    expected = [[1.643168] + [-0.547723] * 3, [0.547723] * 3 + [-1.643168], [1.095445] * 2 + [-1.095445] * 2]
    np.testing.assert_allclose(sepa.REINFORCE_PP_BASELINE.compute_step(context(*STEP)), expected, atol=6e-7)
    signs = [[1, -1, -1, -1], [1, 1, 1, -1], [1, 1, -1, -1]]
    np.testing.assert_allclose(sepa.REINFORCE_PP.compute_step(context(*STEP)), signs, atol=6e-7)
    assert (sepa.RLOO.needs_group, sepa.DR_GRPO.needs_group, sepa.REINFORCE_PP.needs_group) == (True, True, False)
    by_tokens = [[2.157277] + [-0.196116] * 3, [0.980581] * 3 + [-1.372813], [1.568929] * 2 + [-0.784465] * 2]
    advs_PG = sepa.REINFORCE_PP_BASELINE.compute_step(context(*STEP, weight="tokens"))
    np.testing.assert_allclose(advs_PG, by_tokens, atol=6e-7)
    step = [[1, 1], [0, 0], [1, 0]]
    np.testing.assert_allclose(sepa.reinforce_pp_advantages(rewards(*step)), [[1, 1], [-1, -1], [1, -1]], atol=1e-7)
    assert [a.tolist() for a in sepa.reinforce_pp_baseline_advantages(rewards(*step), [])[:2]] == [
        [0.0, 0.0],
        [0.0, 0.0],
    ]
    short_and_right = [np.array([3, 3]), np.array([3, 3]), np.array([1, 9])]
    advs_PG = sepa.reinforce_pp_baseline_advantages(rewards(*step), short_and_right, weight="tokens")
    assert advs_PG[0].tolist() == advs_PG[1].tolist()
    assert advs_PG[0][0] > 0.1  # minus the mean over tokens, which is below 0 here


@pytest.mark.parametrize("value", [0.0, 0.1, -2.5])
@pytest.mark.parametrize("spec", [sepa.REINFORCE_PP, sepa.REINFORCE_PP_BASELINE, sepa.GDPO], ids=lambda spec: spec.name)
def test_a_step_of_equal_rewards_gets_exact_zeros(spec, value):
    for params in ({}, {"weight": "tokens"}):
        assert not flat(spec.compute_step(context([value] * 3, [], [value] * 4, [value], **params))).any()
    assert spec.compute_step(context()) == []


@settings(max_examples=40)
@given(steps, st.data())
def test_they_are_free_of_shift_and_scale_and_of_what_a_group_is_beside(step, data):
    shift, factor = data.draw(st.floats(-5, 5)), data.draw(st.floats(0.5, 4.0))
    moved = [factor * (rewards_G + shift) for rewards_G in step]
    lengths_PG = [np.arange(1, len(r) + 1) for r in step]
    for function in (
        sepa.reinforce_pp_advantages,
        lambda s: sepa.reinforce_pp_baseline_advantages(s, lengths_PG),
        lambda s: sepa.reinforce_pp_baseline_advantages(s, lengths_PG, weight="tokens"),
    ):
        plain = flat(function(step))
        np.testing.assert_allclose(flat(function(moved)), plain, atol=1e-5)
        assert np.isfinite(plain).all()
        if plain.any() and function is sepa.reinforce_pp_advantages:
            np.testing.assert_allclose([plain.mean(), plain.std()], [0.0, 1.0], atol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
def test_gdpo_is_as_published(ddof):
    """Each reward within its group, then their sum over the step; written out with plain loops."""
    stream = np.random.default_rng(0)
    named = [{"a": stream.normal(size=n), "b": 50 * stream.normal(size=n), "unused": np.ones(n)} for n in (4, 3, 5)]
    weights = {"a": 0.3, "b": 2.0}
    rewards_PG = [0.3 * each["a"] + 2.0 * each["b"] for each in named]
    sums = []
    for each in named:
        scaled = {k: (each[k] - each[k].mean()) / (each[k].std(ddof=ddof) + 1e-4) for k in weights}
        sums.append(sum(w * scaled[k] for k, w in weights.items()))
    expected = (flat(sums) - flat(sums).mean()) / (flat(sums).std(ddof=ddof) + 1e-4)
    got = sepa.GDPO.compute_step(context(*rewards_PG, named=named, given=weights, ddof=ddof))
    np.testing.assert_allclose(flat(got), expected, rtol=1e-9, atol=1e-12)


def test_gdpo_names_the_reward_that_a_group_lacks():
    named = [{"a": np.zeros(4)}, {}, {"a": np.zeros(4)}]
    with pytest.raises(CreditError, match=r"group 1 has completions .*\[credit.reward-missing\]"):
        sepa.GDPO.compute_step(context(*STEP, named=named, given={"b": 1.0, "c": 1.0}, weights={"a": 1.0}))
    empty = [{"a": np.arange(4.0)}, {}]
    assert sepa.GDPO.compute_step(context([0, 1, 2, 3], [], named=empty, weights={"a": 1.0}))[1].size == 0
    one = flat(sepa.GDPO.compute_step(context(*STEP)))  # the sum where no reward has a name
    np.testing.assert_allclose(one, flat(sepa.GDPO.compute_step(context(*STEP, given={"match": 3.0}))))
    assert one.std(ddof=1) == pytest.approx(1.0, abs=1e-3)
    right, punishment = np.array([1.0, 0.0, 1.0, 0.0]), np.array([-0.01, 0.0, 0.0, 0.0])
    plain = sepa.GDPO.compute_step(context(right, named=[{"right": right}], weights={"right": 1.0}))[0]
    shaped = {"named": [{"right": right}], "shaping": [punishment], "weights": {"right": 1.0}}
    assert 0.002 < (plain - sepa.GDPO.compute_step(context(right + punishment, **shaped))[0])[0] < 0.01
    right, penalty = np.array([1.0, 0.0, 1.0, 0.0]), np.array([-100.0, 0.0, 0.0, -100.0])
    named = [{"right": right, "penalty": penalty}]
    plain = sepa.grpo_advantages(right + penalty, scale="std", ddof=1)
    apart = sepa.GDPO.compute_step(context(right + penalty, named=named, given={"right": 1.0, "penalty": 1.0}))[0]
    assert plain[0] < -0.8 < plain[3] + 0.1 < 0.0  # a right answer is as bad as a wrong one
    np.testing.assert_allclose(apart, [0, 0, 1.224645, -1.224645], atol=2e-4)
    weighted = sepa.GDPO.compute_step(
        context(right + penalty, named=named, given={"right": 1.0, "penalty": 1.0}, weights={"right": 2.0})
    )
    np.testing.assert_allclose(weighted, sepa.gdpo_advantages([right], named, weights={"right": 2.0}))


logits = arrays(np.float64, 6, elements=st.floats(-8, 8))


def advantages(*rewards_G, **params):
    context = TokenAdvantageContext(
        token_rewards_G=[np.array(r, dtype=np.float64) for r in rewards_G],
        logprobs_G=[np.zeros(len(r)) for r in rewards_G],
        params=params,
    )
    return [advs_T.tolist() for advs_T in sepa.DISTILLATION.compute_tokens(context)]


@settings(max_examples=30)
@given(arrays(np.float64, st.integers(0, 12), elements=st.floats(-20, 20)), st.floats(0, 1), st.floats(0.1, 2))
def test_an_advantage_is_the_discounted_sum_of_the_rewards_that_follow(rewards_T, discount, coef):
    wanted = [coef * sum(discount**n * r for n, r in enumerate(rewards_T[t:])) for t in range(len(rewards_T))]
    assert_allclose(advantages(rewards_T, discount=discount, coef=coef)[0], wanted, atol=1e-9)
    assert advantages([1.0, -2.0, 4.0], [], [3.0]) == [[1.0, -2.0, 4.0], [], [3.0]]
    assert (sepa.DISTILLATION.needs_verdict, sepa.DISTILLATION.needs_token_rewards) == (False, True)


def log_softmax(x_V):
    return x_V - x_V.max() - np.log(np.exp(x_V - x_V.max()).sum())


@settings(max_examples=30)
@given(logits, logits)
def test_the_expected_gradient_is_that_of_the_reverse_kl(student_V, teacher_V):
    def reverse_kl(x_V):
        log_p_V = log_softmax(x_V)
        return float((np.exp(log_p_V) * (log_p_V - log_softmax(teacher_V))).sum())

    log_p_V = log_softmax(student_V)
    p_V = np.exp(log_p_V)
    drawn_V = np.array([advantages([reward])[0][0] for reward in log_softmax(teacher_V) - log_p_V])
    scores_VV = np.eye(6) - p_V  # d log p(v) / d logits
    expected_V = (p_V[:, None] * drawn_V[:, None] * scores_VV).sum(axis=0)
    step = 1e-5
    numeric = [(reverse_kl(student_V + step * e) - reverse_kl(student_V - step * e)) / (2 * step) for e in np.eye(6)]
    assert_allclose(expected_V, -np.array(numeric), atol=1e-7)
