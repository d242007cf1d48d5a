"""Scores keep failure and number apart; counts go by the action mask."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import RetrainError
from retrain.kernel.types import Completion, Outcome, Score, StopReason, TrainBatch, TrainRow, percentile_99
from retrain.observe.health.monitors import HealthError
from retrain.observe.watchdog.watchdog import DeadlineError


@pytest.mark.parametrize("value", [0, 1, 0.5, -3, True, np.float32(0.25), np.int64(2)])
def test_a_finite_number_is_a_score(value: object) -> None:
    score = Score.of(value)  # type: ignore[arg-type]
    assert score.outcome is Outcome.SCORED
    assert type(score.value) is float
    assert score.value == value


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float64("nan"), None, "right", [1.0], object()])
def test_anything_else_is_not_a_score_and_a_failure_has_no_value(value: object) -> None:
    with pytest.raises((TypeError, ValueError)):
        Score.of(value)  # type: ignore[arg-type]
    for score, outcome in ((Score.failed("x"), Outcome.FAILED), (Score.no_verdict("x"), Outcome.NO_VERDICT)):
        assert (score.outcome, score.value, score.detail) == (outcome, None, "x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        score.value = 2.0  # type: ignore[misc]


def test_counts_go_by_the_action_mask_not_by_advantages() -> None:
    action_T = np.array([False, True, True, False])
    completion = Completion(
        tokens_T=np.arange(4),
        action_T=action_T,
        logprobs_T=np.zeros(4),
        text="",
        stop_reason=StopReason.EOS,
        policy_version=0,
    )
    row = TrainRow(tokens_T=np.arange(4), action_T=action_T, logprobs_T=np.zeros(4), advantages_T=np.zeros(4))
    assert completion.num_actions == 2
    assert TrainBatch(step=0, rows=(row, row), temperature=1.0).num_actions == 4


def test_exit_codes_distinguish_usage_errors_from_failures() -> None:
    kinds = {*RetrainError.__subclasses__(), HealthError, DeadlineError}  # the last two belong to watchers
    failures = {"CreditError", "RewardError", "BackendError", "CheckpointError", "RecordError"}
    found = {kind.__name__: kind.exit_code for kind in kinds}
    expected = dict.fromkeys({*failures, "HealthError", "DeadlineError"}, 1)
    assert found == expected | dict.fromkeys(("ConfigError", "PluginError", "ResumeError"), 2)


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=300))
def test_the_percentile_is_that_of_numpy_to_the_bit(values: list[float]) -> None:
    values_N = np.asarray(values)
    assert percentile_99(values_N) == float(np.percentile(values_N, 99))
    assert values_N.tolist() == values, "the caller's array is unchanged"
    assert np.isnan(percentile_99(np.array([0.5, np.nan, 1.0])))
