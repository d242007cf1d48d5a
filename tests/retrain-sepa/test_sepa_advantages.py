import logging

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pydantic import ValidationError

from retrain.advantages import AdvantageContext
from retrain_sepa.advantages import GrpoParams, MaxrlParams, grpo_advantages, maxrl, maxrl_advantages

EIGHT = [1, 0, 0, 1, 0, 0, 0, 0]
MIXED = [-1, 1, 0, 0.5]
STD, BESSEL = {"scale": "std", "ddof": 0}, {"scale": "std", "ddof": 1}
few = settings(max_examples=40)
finite = st.floats(-1e3, 1e3)
groups = arrays(np.float64, st.integers(2, 16), elements=finite)
unit_groups = arrays(np.float64, st.integers(2, 16), elements=st.integers(0, 8).map(lambda n: n / 8))


def max_rl(rewards):
    return maxrl_advantages(np.asarray(rewards, dtype=np.float64))


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
    np.testing.assert_allclose(grpo_advantages(np.array(rewards, dtype=np.float64), **params), expected, atol=5e-7)


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


def test_maxrl_warns_once_for_each_run(caplog):
    outside = AdvantageContext(rewards_G=np.array([0.0, 1.5]))
    with caplog.at_level(logging.WARNING, logger="retrain.credit"):
        spec = maxrl()
        spec.compute(AdvantageContext(rewards_G=np.array([0.0, 1.0])))
        assert not caplog.records
        spec.compute(outside)
        spec.compute(outside)
        assert len(caplog.records) == 1
        maxrl().compute(outside)
        assert len(caplog.records) == 2
    assert "1.5" in caplog.text


def test_maxrl_eps_is_a_parameter():
    context = AdvantageContext(rewards_G=np.array([0.1, 0.3]), params={"eps": 0.25})
    assert maxrl().compute(context).tolist() == [0.0, 0.0]


@few
@given(groups, st.randoms(), finite)
def test_advantages_follow_a_permutation_and_those_of_grpo_are_centred_and_ignore_a_constant(rewards, random, shift):
    order = list(range(rewards.size))
    random.shuffle(order)
    np.testing.assert_allclose(maxrl_advantages(rewards[order]), maxrl_advantages(rewards)[order], rtol=1e-6, atol=1e-9)
    centred = grpo_advantages(rewards)
    np.testing.assert_allclose(grpo_advantages(rewards[order] + shift), centred[order], atol=1e-9)
    assert abs(centred.sum()) < 1e-9 * (1 + np.abs(rewards).sum())


@few
@given(unit_groups, st.floats(0.5, 100.0))
def test_maxrl_is_free_of_scale(rewards, factor):
    # eps = 1e-6 beside the mean shifts every advantage by about eps / mean of itself.
    np.testing.assert_allclose(maxrl_advantages(rewards * factor), maxrl_advantages(rewards), rtol=1e-3, atol=1e-3)


@few
@given(st.integers(2, 64), st.data())
def test_maxrl_of_right_and_wrong(size, data):
    right = data.draw(st.integers(1, size - 1))
    advs = max_rl([1.0] * right + [0.0] * (size - right))
    np.testing.assert_allclose(advs[:right], (size - right) / right, rtol=1e-4)
    np.testing.assert_allclose(advs[right:], -1.0, rtol=1e-4)


@pytest.mark.parametrize(
    ("model", "given"),
    [
        (GrpoParams, {"scale": "mean"}),
        (GrpoParams, {"ddof": 2}),
        (GrpoParams, {"dof": 1}),
        (MaxrlParams, {"eps": 0.0}),
        (MaxrlParams, {"eps": "small"}),
    ],
)
def test_wrong_parameters_are_refused(model, given):
    with pytest.raises(ValidationError):
        model.model_validate(given)
