"""Fields of the step's line about rewards, groups and lengths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.algorithm import Credit
from retrain.kernel.types import Group, GroupStatus, Outcome, StopReason, groups_of, num_correct, verdicts
from retrain.tasks.scoring.build import has_verifier

Fields = dict[str, Any]
PERCENTILES = (10, 50, 90)


def step_metrics(config: Config, groups: Sequence[Group], credit: Credit) -> Fields:
    is_judged = has_verifier(config)
    fields = _measured(groups, credit.statuses_P, is_judged=is_judged)
    fields |= task_metrics(config.data.task_names, groups, credit, is_judged=is_judged)
    if config.training.refill:
        dropped = [group for number, group in enumerate(groups) if not credit.trains(number)]
        fields |= {
            "rounds": 1 + max(group.round for group in groups),
            "drawn_groups": len(groups),
            "surplus_groups": Counter(credit.statuses_P)[GroupStatus.SURPLUS],
            "dropped_tokens": sum(completion.num_actions for group in dropped for completion in group.completions),
        }
    # These completions had a verdict, and lost it because they were truncated.
    if config.training.overlong == "drop":
        pairs = [pair for group in groups for pair in zip(group.raw_scores, group.scores, strict=True)]
        fields["overlong_dropped_count"] = sum(raw.value is not None and score.value is None for raw, score in pairs)
    return fields


def _measured(groups: Sequence[Group], statuses: Sequence[GroupStatus], *, is_judged: bool) -> Fields:
    return (reward_metrics(groups) if is_judged else {}) | group_metrics(statuses) | length_metrics(groups)


def task_metrics(names: Sequence[str], groups: Sequence[Group], credit: Credit, *, is_judged: bool) -> Fields:
    """Fields of each of `[[data.tasks]]` that the step has groups of, ties aside, and the mean over these (macro)."""
    fields, rates = Fields(), list[float]()
    for name in names:
        own = [pair for pair in zip(groups, credit.statuses_P, strict=True) if groups_of(name, pair[:1])]
        if not first_round([group for group, _ in own]):
            continue
        measured = _measured(*zip(*own, strict=True), is_judged=is_judged)
        fields |= {f"task_{name}_{field}": value for field, value in measured.items() if field[:7] != "reward_"}
        rates += [measured["correct_rate"]] if is_judged else []
    return fields | ({"macro_correct_rate": sum(rates) / len(rates)} if rates else {})


def reward_metrics(groups: Sequence[Group]) -> Fields:
    """Rates over the completions of the first round, trained or not; mean and quantiles are absent without any
    verdict.

    Further rounds are sampled because the first taught too little: including them would bias a rate by that choice.
    Only `no_verdict_count` and `failed_score_count` cover all rounds. A group is eligible for ties if at least two
    completions have a score; it is tied if at least two scores are equal.
    """
    outcomes = Counter(score.outcome for group in groups for score in group.raw_scores)
    groups = first_round(groups)
    values = [verdicts(group) for group in groups]
    flat = [value for group in values for value in group]
    total = sum(len(group.completions) for group in groups)
    eligible = [group for group in values if len(group) >= 2]
    tied = sum(len(set(group)) < len(group) for group in eligible)
    uniform = sum(len(set(group)) == 1 for group in eligible)
    pairs = sum(math.comb(len(group), 2) for group in eligible)
    tied_pairs = sum(math.comb(count, 2) for group in eligible for count in Counter(group).values())
    fields: Fields = {"mean_reward": float(np.mean(flat)), **quantiles("reward", flat)} if flat else {}
    return fields | {
        "correct_rate": sum(num_correct(group) for group in groups) / total,
        "no_verdict_count": outcomes[Outcome.NO_VERDICT],
        "failed_score_count": outcomes[Outcome.FAILED],
        "reward_tie_eligible_groups": len(eligible),
        "reward_tie_groups": tied,
        "reward_uniform_groups": uniform,
        "reward_tie_group_rate": tied / max(len(eligible), 1),
        "reward_uniform_group_rate": uniform / max(len(eligible), 1),
        "reward_tie_pair_rate": tied_pairs / max(pairs, 1),
        "reward_unique_fraction_mean": float(np.mean([len(set(g)) / len(g) for g in eligible])) if eligible else 0.0,
    }


def first_round(groups: Sequence[Group]) -> Sequence[Group]:
    """The groups of the prompts that the step began with, not selected by an outcome: all of them without refill."""
    return [group for group in groups if not group.round]


def group_metrics(statuses: Sequence[GroupStatus]) -> Fields:
    counts = Counter(statuses)
    return {
        "useful_groups": counts[GroupStatus.INFORMATIVE],
        "all_right_groups": counts[GroupStatus.ALL_RIGHT],
        "all_wrong_groups": counts[GroupStatus.ALL_WRONG],
        "tied_groups": counts[GroupStatus.TIED],
        "no_verdict_groups": counts[GroupStatus.NO_VERDICT],
    }


def length_metrics(groups: Sequence[Group]) -> Fields:
    """Completion lengths in tokens, before any masking, and the share of truncated completions.

    Mean and share are over the first round, like the rewards; longest and sum over all sampled completions.
    """
    sampled = [completion.num_actions for group in groups for completion in group.completions]
    greedy = [group.greedy.num_actions for group in groups if group.greedy]
    completions = [completion for group in first_round(groups) for completion in group.completions]
    lengths = np.array([completion.num_actions for completion in completions])
    cut = sum(completion.stop_reason is StopReason.LENGTH for completion in completions)
    return {
        "max_token_hit_rate": cut / len(completions),
        "mean_tokens": float(lengths.mean()),
        "max_tokens_seen": max(sampled),
        "sampled_tokens": sum(sampled) + sum(greedy),
    }


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """`{name}_p10`, `_p50`, `_p90`: the smallest of `values` that at least 10, 50 and 90 % of them do not exceed."""
    ordered = sorted(values)
    return {f"{name}_p{percent}": float(ordered[-(-percent * len(ordered) // 100) - 1]) for percent in PERCENTILES}
