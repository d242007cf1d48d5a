"""The public one-call function: the same pipeline, with whatever is installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose

from retrain.advantages import compute_composable_advantages
from retrain.kernel.errors import ConfigError, CreditError

U = [0.2, 0.3, 1.8, 0.1, 0.9, 0.2, 2.1, 0.3, 0.1, 0.2]
MASK = [t in (2, 6) for t in range(10)]
SEPA_HALF = [2.817944, 2.842137, 3.570968, 2.793750, 2.987298, 2.817944, 3.716129, 2.842137, 2.793750, 2.817944]
REWARDS_G = [1.0, 0.0, 0.0, 0.0]  # maxrl: 2.999988 for the first
LOGPROBS_G = [[-u for u in U], [-1.0], [-1.0], [-1.0]]
MASKS_G = [MASK, [False], [False], [False]]


def test_the_worked_example_end_to_end() -> None:
    result = compute_composable_advantages(REWARDS_G, LOGPROBS_G, MASKS_G, sepa_lambda=0.5)
    assert_allclose(result.token_advs[0], SEPA_HALF, atol=2e-5)
    assert_allclose(result.uncertainties[0], U)
    assert result.pooled[0][np.array(MASK)].tolist() == [1.8, 2.1]
    assert result.flow.condition == "maxrl+gtpo_sepa"


def test_toys_lists_and_missing_masks(toys: Path) -> None:
    result = compute_composable_advantages(
        [1, 0], [[-1, -1], [-1]], advantage_mode="toy_raw", transform_mode="toy_index", uncertainty_kind="toy_nll"
    )
    assert [advs.tolist() for advs in result.token_advs] == [[1.0, 2.0], [0.0]]
    assert result.metrics == {"toy_groups": 1.0}


def test_faults_are_named() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gtpo'"):
        compute_composable_advantages([1, 0], [[-1], [-1]], transform_mode="gtop")
    with pytest.raises(CreditError, match="log-probabilities has 1 entries, expected 2"):
        compute_composable_advantages([1, 0], [[-1]], [[False], [False]])
    with pytest.raises(CreditError, match="needs entropies"):
        compute_composable_advantages([1, 0], [[-1], [-1]], uncertainty_kind="shannon_entropy")
