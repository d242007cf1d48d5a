"""opo, passk, remax and otb on the vectors of `loss_vectors.json`, which are verl's where it has them."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrain.advantages import AdvantageContext, StepAdvantageContext, TokenAdvantageContext
from retrain_sepa import advantages as sepa
from tests.kit import __file__ as kit

VECTORS = json.loads(Path(kit).with_name("loss_vectors.json").read_text(encoding="utf-8"))["advantages"]
REWARDS, LENGTHS = np.array(VECTORS["rewards"]), np.array(VECTORS["lengths"], dtype=np.int64)
rewards = arrays(np.float64, st.integers(2, 12), elements=st.floats(-1e3, 1e3))


def step_of(*groups, lengths=None, greedy=()):
    given_PG = [np.asarray(group, dtype=np.float64) for group in groups]
    return StepAdvantageContext(
        rewards_PG=given_PG,
        lengths_PG=lengths or [np.ones(len(group), dtype=np.int64) for group in given_PG],
        named_rewards_PG=[{}] * len(given_PG),
        shaping_PG=[np.zeros(len(group)) for group in given_PG],
        greedy_P=np.array(greedy, dtype=np.float64),
    )


def test_opo_takes_off_the_mean_weighted_by_length():
    step = step_of(
        REWARDS, [1, 1], [0.3], [], lengths=[LENGTHS, np.array([3, 9]), np.array([4]), np.zeros(0, np.int64)]
    )
    first, *others = sepa.OPO.compute_step(step)
    assert first == pytest.approx(VECTORS["opo"], abs=1e-12)
    assert [each.tolist() for each in others] == [[0.0, 0.0], [0.0], []]


@settings(max_examples=40)
@given(rewards, st.integers(1, 50))
def test_opo_with_equal_lengths_is_grpo(rewards_G, length):
    found = sepa.opo_advantages(rewards_G, np.full(len(rewards_G), length))
    assert found == pytest.approx(sepa.grpo_advantages(rewards_G), abs=1e-9)


@pytest.mark.parametrize(
    ("rewards", "params", "wanted"),
    [
        (REWARDS, {}, VECTORS["passk (best minus second, others 0)"]),
        (REWARDS, {"scale": "std"}, [0.5 / (np.std(REWARDS, ddof=1) + 1e-6), 0, 0, 0]),
        ([0.0, 1.0, 0.0], {}, [0, 1, 0]),
        ([1.0, 1.0, 0.0], {}, [0, 0, 0]),  # a tie: none is best
        ([1.0, 1.0, 0.0], {"scale": "std"}, [0, 0, 0]),
        ([0.1, 0.1, 0.1], {"scale": "std"}, [0, 0, 0]),
        ([-2.0, -1.0], {}, [0, 1]),
        ([1.0], {}, [0]),
        ([], {}, []),
    ],
)
def test_passk_gives_the_best_its_lead(rewards, params, wanted):
    context = AdvantageContext(rewards_G=np.array(rewards, dtype=np.float64), params=params)
    assert sepa.PASSK.compute(context).tolist() == pytest.approx(list(wanted), abs=1e-12)


def test_remax_compares_with_the_greedy_completion_of_the_same_prompt():
    """Also in a group whose rewards are all equal; a group whose greedy completion has no verdict gets nothing."""
    found = sepa.REMAX.compute_step(step_of(REWARDS, [1, 1], [0, 1], [], greedy=[0.25, 0.0, np.nan, 1.0]))
    assert [each.tolist() for each in found] == [VECTORS["remax, greedy reward 0.25"], [1, 1], [0, 0], []]
    assert sepa.REMAX.needs_greedy
    assert not sepa.REMAX.needs_group  # one completion and its baseline are enough


def otb(rewards, logprobs, squares):
    logprobs_G, squares_G = ([np.array(each, dtype=np.float64) for each in rows] for rows in (logprobs, squares))
    context = TokenAdvantageContext(
        token_rewards_G=[np.zeros(len(each)) for each in logprobs_G],
        logprobs_G=logprobs_G,
        rewards_G=np.array(rewards, dtype=np.float64),
        squared_probs_G=squares_G,
    )
    return [each.tolist() for each in sepa.OTB.compute_tokens(context)]


def test_otb_takes_off_the_baseline_of_least_variance_at_each_token():
    given_ = VECTORS["otb"]
    found = otb(given_["reward"], given_["old_logprobs"], given_["sum_of_squared_probabilities"])
    assert np.array(found) == pytest.approx(np.array(given_["advantage"]), abs=1e-8)  # they carry verl's 1e-8
    assert (sepa.OTB.needs_squared_probs, sepa.OTB.needs_group, sepa.OTB.needs_verdict) == (True, True, True)


def test_otb_has_no_baseline_beyond_the_second_longest_completion():
    alike = [[-0.5] * 4, [-0.5] * 2, [-0.5]], [[0.5] * 4, [0.5] * 2, [0.5]]
    found = otb([1.0, 0.0, 0.5], *alike)
    assert found[0] == pytest.approx([0.5, 0.5, 1.0, 1.0])
    assert found[1] == pytest.approx([-0.5, -0.5])
    assert found[2] == pytest.approx([0.0])


def test_otb_of_certain_tokens_and_of_nothing_is_finite():
    assert otb([1.0, 0.0], [[0.0, 0.0], [0.0]], [[1.0, 1.0], [1.0]]) == [[1.0, 1.0], [0.0]]
    assert otb([1.0, 0.0], [[0.0], [-0.7]], [[1.0], [0.5]]) == [[pytest.approx(1.0)], [pytest.approx(0.0)]]
    assert otb([1.0, 0.0], [[], []], [[], []]) == [[], []]
    assert otb([], [], []) == []


@settings(max_examples=40)
@given(rewards, st.integers(1, 5), st.randoms(use_true_random=False))
def test_otb_is_between_the_rewards_of_the_group(rewards_G, length, random):
    logprobs = [[-0.1 - random.random() for _ in range(length)] for _ in rewards_G]
    squares = [[float(np.exp(2 * each)) + 0.01 for each in row] for row in logprobs]  # at least p squared
    baselines = rewards_G[:, None] - np.array(otb(rewards_G, logprobs, squares))
    assert (baselines >= rewards_G.min() - 1e-6).all()
    assert (baselines <= rewards_G.max() + 1e-6).all()
