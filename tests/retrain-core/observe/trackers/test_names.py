"""The names that users of wandb know, and that no two fields share one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.observe.trackers.recording import CONSTANTS, metric_name, named_config, named_metrics

FIELDS = ("mean_reward", "reward_tie_groups", "backend_x", "bp_x", "eval_x", "exec_entropy_mean", "post_")


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("loss", "train/loss"),
        ("reported_loss", "train/reported_loss"),
        ("loss_is_placeholder", "train/loss_is_placeholder"),
        ("uncertainty_kind", "train/uncertainty_kind"),
        ("mean_reward", "train/rewards/mean_reward"),
        ("correct_rate", "train/rewards/correct_rate"),
        ("running_correct_rate", "train/rewards/running_correct_rate"),
        ("reward_tie_eligible_groups", "train/rewards/tie_eligible_groups"),
        ("reward_tie_group_rate", "train/rewards/tie_group_rate"),
        ("reward_tie_pair_rate", "train/rewards/tie_pair_rate"),
        ("reward_uniform_groups", "train/rewards/uniform_groups"),
        ("reward_uniform_group_rate", "train/rewards/uniform_group_rate"),
        ("reward_unique_fraction_mean", "train/rewards/unique_fraction_mean"),
        ("backend_reports_sync_loss", "train/backend/reports_sync_loss"),
        ("backend_preserves_token_advantages", "train/backend/preserves_token_advantages"),
        ("sepa_lambda", "train/sepa_lambda"),
        ("sepa_gate_open", "train/sepa_gate_open"),
        ("max_token_hit_rate", "train/max_token_hit_rate"),
        ("num_datums", "train/num_datums"),
        ("step_time_s", "train/step_time_s"),
        ("clip_fraction", "train/clip_fraction"),
        ("adv_cap_fraction", "train/adv_cap_fraction"),
        ("exec_entropy_mean", "train/entropy/exec_mean"),
        ("plan_entropy_var", "train/entropy/plan_var"),
        ("exec_surprisal_var", "train/surprisal/exec_var"),
        ("post_exec_surprisal_mean", "train/surprisal/post_exec_mean"),
        ("post_plan_surprisal_var", "train/surprisal/post_plan_var"),
        ("post_plan_uncertainty_mean", "train/uncertainty/post_plan_mean"),
        ("bp_p_star", "train/backpressure/p_star"),
        ("eval_pass_at_4", "eval/pass_at_4"),
        ("mine", "train/mine"),
        ("exec_surprisal_meanness", "train/exec_surprisal_meanness"),
        ("reward_length", "train/reward_length"),
    ],
)
def test_each_field_has_its_known_name(field: str, name: str) -> None:
    assert metric_name(field) == name


FIELD = st.one_of(st.from_regex(r"[a-z_]{1,12}", fullmatch=True), st.sampled_from(FIELDS))


@given(FIELD, FIELD)
def test_two_fields_never_share_a_name(one: str, other: str) -> None:
    assert (metric_name(one) == metric_name(other)) == (one == other)


def test_only_what_the_line_has_is_named() -> None:
    constants = dict.fromkeys(CONSTANTS, "x")
    line = {"step": 3, "loss": None, "mean_reward": 0.0, "sepa_gate_open": False, **constants}
    assert named_metrics(line) == {"train/rewards/mean_reward": 0.0, "train/sepa_gate_open": False}
    assert named_metrics({}) == {}


def test_a_configuration_without_sepa_has_no_sepa_keys() -> None:
    manifest = {"seed": 7, "condition": "grpo+none", "config": {"training": {"lr": 0.1}, "gtpo": None}}
    assert named_config(manifest) == {"seed": 7, "condition": "grpo+none", "lr": 0.1}
