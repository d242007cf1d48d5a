"""Distillation: its numbers, and that their expected gradient is that of the reverse KL divergence."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from numpy.testing import assert_allclose
from pydantic import ValidationError

from retrain.advantages import TokenAdvantageContext
from retrain_sepa.advantages import DISTILLATION, DistillationParams

rewards = arrays(np.float64, st.integers(0, 12), elements=st.floats(-20, 20))
logits = arrays(np.float64, 6, elements=st.floats(-8, 8))


def advantages(*rewards_G, **params):
    context = TokenAdvantageContext(
        token_rewards_G=[np.array(r, dtype=np.float64) for r in rewards_G],
        logprobs_G=[np.zeros(len(r)) for r in rewards_G],
        params=params,
    )
    return [advs_T.tolist() for advs_T in DISTILLATION.compute_tokens(context)]


def test_each_token_is_for_itself_unless_discounted():
    assert advantages([1.0, -2.0, 4.0], [], [3.0]) == [[1.0, -2.0, 4.0], [], [3.0]]
    assert (DISTILLATION.needs_verdict, DISTILLATION.needs_token_rewards) == (False, True)
    for wrong in ({"coef": 0.0}, {"discount": 1.5}, {"gamma": 1.0}):
        with pytest.raises(ValidationError):
            DistillationParams(**wrong)


@settings(max_examples=30)
@given(rewards, st.floats(0, 1), st.floats(0.1, 2))
def test_an_advantage_is_the_discounted_sum_of_the_rewards_that_follow(rewards_T, discount, coef):
    wanted = [coef * sum(discount**n * r for n, r in enumerate(rewards_T[t:])) for t in range(len(rewards_T))]
    assert_allclose(advantages(rewards_T, discount=discount, coef=coef)[0], wanted, atol=1e-9)


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
