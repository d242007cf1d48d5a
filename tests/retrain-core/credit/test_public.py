"""The public one-call function: the same pipeline, with whatever is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from retrain.advantages import compute_composable_advantages
from retrain.kernel.errors import ConfigError, CreditError
from tests.kit.problems import codes_in


def test_toys_lists_and_missing_masks(toys: Path) -> None:
    result = compute_composable_advantages(
        [1, 0], [[-1, -1], [-1]], advantage_mode="toy_raw", transform_mode="toy_index", uncertainty_kind="toy_nll"
    )
    assert [advs.tolist() for advs in result.token_advs] == [[1.0, 2.0], [0.0]]
    assert result.metrics == {"toy_groups": 1.0}


def test_several_rewards_normalisation_and_clip() -> None:
    right, penalty = np.array([1.0, 0.0, 1.0, 0.0]), np.array([-100.0, 0.0, 0.0, -100.0])
    logprobs = [[-1.0, -1.0]] * 4
    result = compute_composable_advantages(
        right + penalty,
        logprobs,
        advantage_mode="gdpo",
        transform_mode="none",
        named_rewards={"right": right, "penalty": penalty},
        advantage_params={"weights": {"right": 1.0, "penalty": 1.0}},
    )
    assert_allclose([advs_T[0] for advs_T in result.token_advs], [0, 0, 1.224645, -1.224645], atol=2e-4)
    clipped = compute_composable_advantages(
        right, logprobs, advantage_mode="reinforce_pp", transform_mode="none", batch_norm=True, advantage_clip=0.5
    )
    assert [advs_T[0] for advs_T in clipped.token_advs] == [0.5, -0.5, 0.5, -0.5]


def test_faults_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gtpo'"):
        compute_composable_advantages([1, 0], [[-1], [-1]], transform_mode="gtop")
    with pytest.raises(CreditError) as caught:
        compute_composable_advantages([1, 0], [[-1]], [[False], [False]])
    assert codes_in(caught) == ["credit.wrong-count"]
