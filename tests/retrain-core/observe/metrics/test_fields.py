"""Fields of the metrics line, from groups made by hand."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.kernel.types import Completion, Group, StopReason, group_status
from retrain.observe.metrics.fields import group_metrics, length_metrics, quantiles, reward_metrics

MakeGroup = Callable[..., Group]
MakeCompletion = Callable[..., Completion]


def test_rates_are_over_all_completions_and_ties_over_verdicts(make_group: MakeGroup) -> None:
    fields = reward_metrics([make_group(1, 0, 0, None), make_group(1, 1, "broken", None), make_group(0.25, None)])
    assert fields == {
        "mean_reward": pytest.approx(3.25 / 6),
        "reward_p10": 0.0,
        "reward_p50": 0.25,
        "reward_p90": 1.0,
        "correct_rate": 3 / 10,
        "no_verdict_count": 3,
        "failed_score_count": 1,
        "reward_tie_eligible_groups": 2,
        "reward_tie_groups": 2,
        "reward_uniform_groups": 1,
        "reward_tie_group_rate": 1.0,
        "reward_uniform_group_rate": 0.5,
        "reward_tie_pair_rate": 2 / 4,
        "reward_unique_fraction_mean": pytest.approx((2 / 3 + 1 / 2) / 2),
    }


def test_the_threshold_of_correct_is_the_groups_own(make_group: MakeGroup) -> None:
    group = make_group(0.3, 0.5, 0.8, 0.81, 1.0)
    rates = {above: reward_metrics([replace(group, correct_above=above)])["correct_rate"] for above in (0.0, 0.5, 0.8)}
    assert reward_metrics([group])["correct_rate"] == rates[0.5] == 0.6
    assert (rates[0.0], rates[0.8]) == (1.0, 0.4)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=40))
def test_quantiles_are_scores_that_occur(values: list[float]) -> None:
    found = quantiles("reward", values)
    expected = np.quantile(np.array(values), [0.1, 0.5, 0.9], method="inverted_cdf")
    assert list(found.values()) == expected.tolist()
    assert list(found) == ["reward_p10", "reward_p50", "reward_p90"]


def test_without_any_verdict_there_is_no_mean_reward(make_group: MakeGroup) -> None:
    fields = reward_metrics([make_group(None, "broken")])
    assert not {"mean_reward", "reward_p10", "reward_p50", "reward_p90"} & set(fields)
    assert fields["correct_rate"] == 0.0
    assert all(np.isfinite(value) for value in fields.values())


def test_useful_groups_and_why_the_others_are_not(make_group: MakeGroup) -> None:
    groups = (make_group(1, 0), make_group(1, 1), make_group(0, 0), make_group(0.5, 0.5), make_group(1, None))
    assert group_metrics([group_status(group) for group in groups]) == {
        "useful_groups": 1,
        "all_right_groups": 1,
        "all_wrong_groups": 1,
        "tied_groups": 1,
        "no_verdict_groups": 1,
    }


def test_lengths_are_of_all_completions(make_group: MakeGroup, make_completion: MakeCompletion) -> None:
    cut = make_completion([-1] * 6, stop_reason=StopReason.LENGTH)
    group = make_group(1, None, completions=[cut, make_completion([-1] * 2)])
    assert length_metrics([group]) == {
        "max_token_hit_rate": 0.5,
        "mean_tokens": 4.0,
        "max_tokens_seen": 6,
        "sampled_tokens": 8,
    }
