"""Scores keep failure and number apart; counts of groups and tokens, fields of a line, and problems told once."""

import dataclasses

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.kernel.errors import ConfigError, Problem, RetrainError
from retrain.kernel.progress import merge_fields, train_fields
from retrain.kernel.types import (
    Completion,
    GroupStatus,
    Outcome,
    Score,
    StopReason,
    TrainBatch,
    TrainRow,
    group_status,
    num_correct,
    percentile_99,
    verdicts,
)
from retrain.observe.health.monitors import HealthError
from retrain.observe.watchdog.watchdog import DeadlineError
from tests.kit.problems import refused


@pytest.mark.parametrize("value", [0, 1, 0.5, -3, True, np.float32(0.25), np.int64(2)])
def test_a_finite_number_is_a_score(value):
    score = Score.of(value)
    assert score.outcome is Outcome.SCORED
    assert type(score.value) is float
    assert score.value == value


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, np.float64("nan"), None, "right", [1.0], object()])
def test_anything_else_is_not_a_score_and_a_failure_has_no_value(value):
    with pytest.raises((TypeError, ValueError)):
        Score.of(value)
    for score, outcome in ((Score.failed("x"), Outcome.FAILED), (Score.no_verdict("x"), Outcome.NO_VERDICT)):
        assert (score.outcome, score.value, score.detail) == (outcome, None, "x")
    with pytest.raises(dataclasses.FrozenInstanceError):
        score.value = 2.0


def test_counts_go_by_the_action_mask_and_exit_codes_by_the_kind_of_error():
    action_T = np.array([False, True, True, False])
    arrays = {"tokens_T": np.arange(4), "action_T": action_T, "logprobs_T": np.zeros(4)}
    completion = Completion(**arrays, text="", stop_reason=StopReason.EOS, policy_version=0)
    row = TrainRow(**arrays, advantages_T=np.zeros(4))
    assert completion.num_actions == 2
    assert TrainBatch(step=0, rows=(row, row), temperature=1.0).num_actions == 4
    kinds = {*RetrainError.__subclasses__(), HealthError, DeadlineError}  # the last two belong to watchers
    failures = {"CreditError", "RewardError", "BackendError", "CheckpointError", "RecordError"}
    found = {kind.__name__: kind.exit_code for kind in kinds}
    expected = dict.fromkeys({*failures, "HealthError", "DeadlineError"}, 1)
    assert found == expected | dict.fromkeys(("ConfigError", "PluginError", "ResumeError"), 2)


@settings(max_examples=50)
@given(st.lists(st.floats(0.0, 1e6), min_size=1, max_size=300))
def test_the_percentile_is_that_of_numpy_to_the_bit(values):
    values_N = np.asarray(values)
    assert percentile_99(values_N) == float(np.percentile(values_N, 99))
    assert values_N.tolist() == values, "the caller's array is unchanged"
    assert np.isnan(percentile_99(np.array([0.5, np.nan, 1.0])))


STATUSES = {
    GroupStatus.INFORMATIVE: [(1, 0), (0.5, 0.5000000000000001), (1, None, 0)],
    GroupStatus.ALL_RIGHT: [(1, 1), (2.5, 2.5), (1, None, 1)],
    GroupStatus.ALL_WRONG: [(0, 0), (-1, -1), (0.0, -0.0)],
    GroupStatus.TIED: [(0.5, 0.5)],
    GroupStatus.NO_VERDICT: [(1, None, "broken"), (None, None), (1,), ()],
}


def test_the_cause_of_a_group(make_group):
    found = {status: [group_status(make_group(*values)) for values in rows] for status, rows in STATUSES.items()}
    assert found == {status: [status] * len(rows) for status, rows in STATUSES.items()}


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(st.one_of(st.none(), st.just("broken"), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2, 2))))
def test_informative_means_two_different_verdicts(values, make_group):
    group = make_group(*values)
    numbers = [value for value in values if isinstance(value, float)]
    assert verdicts(group) == numbers
    assert (group_status(group) is GroupStatus.INFORMATIVE) == (len(set(numbers)) > 1)
    assert num_correct(group) == sum(number > 0.5 for number in numbers)


def test_fields_of_a_step_and_extra_metrics_are_merged_and_faulty_ones_refused():
    expected = {"loss": None, "reported_loss": None, "loss_is_placeholder": False, "trained_tokens": 0, "updates": 0}
    assert train_fields(None) == expected
    merged = merge_fields({"a": 1}, {"b": np.float32(2.0), "c": "text"}, source="x")
    assert merged == {"a": 1, "b": 2.0, "c": "text"}
    assert type(merged["b"]) is float
    not_finite = [("b", value, "plugin.metric-not-finite") for value in (float("nan"), np.float32("inf"))]
    wrong_type = [("b", value, "plugin.metric-type") for value in ([1.0], None)]
    for name, value, code in (("a", 2, "plugin.metric-twice"), *not_finite, *wrong_type):
        assert refused(merge_fields, {"a": 1}, {name: value}, source="x") == [code]


def test_problems_are_told_once_with_one_fix_each():
    failed = "failed to load: mine 1.0: ImportError"
    missing = [
        Problem(where=f"a.toml:{n} [t] k{n}", what=f"no 'p{n}'", why=f"known: {n}\n    {failed}", fix="install it")
        for n in range(16)
    ]
    problems = [*missing, Problem(where="a.toml:99 [x]", what="unknown table", fix="install it"), missing[3]]
    other = Problem(where="a.toml:5 [t] lr", what="must not be negative", fix="raise it")
    text = str(ConfigError(*problems[:5], other, *problems[5:]))
    assert text.startswith("1. 17 problems with one fix:\n    a.toml:0 [t] k0: no 'p0'\n        known: 0\n")
    assert text.endswith("\n2. a.toml:5 [t] lr: must not be negative\n    fix: raise it")
    assert (text.count("install it"), text.count(failed)) == (1, 1)
    assert all(text.count(f"{problem.where}: {problem.what}\n") == 1 for problem in problems)
    assert all(text.count(f"        known: {n}\n") == 1 for n in range(16))
    one = Problem(code="a.b-c", where="here", what="wrong", why="a rule", fix="change it")
    assert str(ConfigError(one, one)) == str(one) == "here: wrong [a.b-c]\n    a rule\n    fix: change it"
    two = Problem(where="there", what="wrong", why="a rule", fix="change it")
    expected = "2 problems with one fix:\n    here: wrong [a.b-c]\n    there: wrong\n    a rule\n    fix: change it"
    assert str(ConfigError(one, two)) == expected
    assert str(ConfigError("first", "second")) == "1. first\n2. second"
    assert ConfigError(one, two).codes == ["a.b-c", ""]
