"""Fields of the metrics line, from groups made by hand."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from retrain.rooms.credit.batch import assign
from retrain.rooms.metrics.metrics import (
    execution_variance,
    group_metrics,
    length_metrics,
    reward_metrics,
    token_metrics,
    train_metrics,
)
from retrain.rooms.metrics.step_records import merge_fields

from retrain.kernel.errors import PluginError
from retrain.kernel.types import Completion, Group, StopReason
from retrain.rooms.credit.flow import CreditFlow
from retrain.rooms.credit.specs import AdvantageSpec, TransformSpec, UncertaintySpec

MakeGroup = Callable[..., Group]
MakeCompletion = Callable[..., Completion]
FLOW = CreditFlow(
    advantage=AdvantageSpec(name="a", compute=lambda ctx: ctx.rewards_G - ctx.rewards_G.mean()),
    transform=TransformSpec(name="t", entropy_transform=lambda u, p, lam: 0.5 * u),
    uncertainty=UncertaintySpec(name="surprisal", compute=lambda ctx: -ctx.logprobs_T),
)


class EverySecond:
    """A detector that marks every second token."""

    def masks(self, completions_G):
        return [np.arange(len(tokens)) % 2 == 1 for tokens in completions_G]


def test_rates_are_over_all_completions_and_ties_over_verdicts(make_group: MakeGroup) -> None:
    fields = reward_metrics([make_group(1, 0, 0, None), make_group(1, 1, "broken", None), make_group(0.25, None)])
    assert fields == {
        "mean_reward": pytest.approx(3.25 / 6),
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


def test_without_any_verdict_there_is_no_mean_reward(make_group: MakeGroup) -> None:
    fields = reward_metrics([make_group(None, "broken")])
    assert "mean_reward" not in fields
    assert fields["correct_rate"] == 0.0
    assert all(np.isfinite(value) for value in fields.values())


def test_useful_groups_and_the_causes_of_the_others(make_group: MakeGroup) -> None:
    groups = (make_group(1, 0), make_group(1, 1), make_group(0, 0), make_group(0.5, 0.5), make_group(1, None))
    credited = assign(groups, FLOW, None, step=0, sepa_lambda=0.0, temperature=1.0)
    assert group_metrics(credited.statuses) == {
        "useful_groups": 1,
        "all_right_groups": 1,
        "all_wrong_groups": 1,
        "tied_groups": 1,
        "no_verdict_groups": 1,
    }
    assert len(credited.batch.rows) == 2


def test_lengths_are_of_all_completions(make_group: MakeGroup, make_completion: MakeCompletion) -> None:
    cut = make_completion([-1] * 6, stop_reason=StopReason.LENGTH)
    group = make_group(1, None, completions=[cut, make_completion([-1] * 2)])
    assert length_metrics([group]) == {
        "max_token_hit_rate": 0.5,
        "mean_tokens": 4.0,
        "max_tokens_seen": 6,
        "sampled_tokens": 8,
    }


def test_token_statistics_before_and_after_pooling(make_group: MakeGroup, make_completion: MakeCompletion) -> None:
    completions = [make_completion([-1, -4, -3], entropies=[1, 2, 3]), make_completion([-5], entropies=[4])]
    credited = assign(
        [make_group(1, 0, completions=completions)], FLOW, EverySecond(), step=0, sepa_lambda=0.5, temperature=1.0
    )
    fields = token_metrics(credited, "surprisal")
    execution = np.array([1.0, 3.0, 5.0])
    assert fields["exec_surprisal_mean"] == pytest.approx(3.0)
    assert fields["exec_surprisal_var"] == pytest.approx(execution.var())
    assert (fields["plan_surprisal_mean"], fields["plan_surprisal_var"]) == (4.0, 0.0)
    assert fields["post_exec_surprisal_var"] == pytest.approx((execution / 2).var())
    assert fields["exec_entropy_mean"] == pytest.approx(np.mean([1, 3, 4]))
    assert execution_variance(credited) == pytest.approx(execution.var())
    assert "post_exec_uncertainty_mean" in token_metrics(credited, "toy")


def test_statistics_of_no_token_are_absent(make_group: MakeGroup) -> None:
    credited = assign([make_group(None, None)], FLOW, None, step=0, sepa_lambda=0.0, temperature=1.0)
    assert token_metrics(credited, "surprisal") == {}
    assert execution_variance(credited) is None


def test_rows_carry_credit_at_action_tokens_only(make_group: MakeGroup, make_completion: MakeCompletion) -> None:
    completions = [make_completion([-1, -2], prompt=3), make_completion([-1]), make_completion([])]
    group = make_group(1, 0, 0, completions=completions)
    batch = assign([group], FLOW, None, step=4, sepa_lambda=0.0, temperature=0.7).batch
    assert (batch.step, batch.temperature, batch.num_actions) == (4, 0.7, 3)
    assert [row.advantages_T.tolist() for row in batch.rows] == [
        [0.0, 0.0, 0.0, pytest.approx(2 / 3), pytest.approx(2 / 3)],
        [0.0, 0.0, pytest.approx(-1 / 3)],
    ]


def test_a_completion_without_a_verdict_takes_no_part(make_group: MakeGroup) -> None:
    credited = assign([make_group(1, None, 0, "broken")], FLOW, None, step=0, sepa_lambda=0.0, temperature=1.0)
    assert [advs.tolist() for advs in credited.result.token_advs[0]] == [[0.5], [-0.5]]
    assert len(credited.batch.rows) == 2


def test_a_step_without_training_has_no_loss() -> None:
    assert train_metrics(None) == {
        "loss": None,
        "reported_loss": None,
        "loss_is_placeholder": False,
        "trained_tokens": 0,
    }


def test_extra_metrics_are_merged_and_faulty_ones_refused() -> None:
    merged = merge_fields({"a": 1}, {"b": np.float32(2.0), "c": "text"}, source="x")
    assert merged == {"a": 1, "b": 2.0, "c": "text"}
    assert type(merged["b"]) is float
    with pytest.raises(PluginError, match="'a' of x exists already"):
        merge_fields({"a": 1}, {"a": 2}, source="x")
    for faulty, shown in (
        (float("nan"), "is nan"),
        (np.float32("inf"), "is inf"),
        ([1.0], "is list"),
        (None, "NoneType"),
    ):
        with pytest.raises(PluginError, match=shown):
            merge_fields({"a": 1}, {"b": faulty}, source="x")
