"""Fields of the step's line about rewards, groups and lengths."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.kernel.informative import GroupStatus, num_correct, verdicts
from retrain.kernel.types import Group, Outcome, StopReason

Fields = dict[str, Any]
PERCENTILES = (10, 50, 90)


def reward_metrics(groups: Sequence[Group]) -> Fields:
    """Rates over all completions of the step, trained or not; mean and quantiles are absent without any verdict.

    A group is eligible for ties if at least two completions have a score; it is tied if at least two scores are equal.
    """
    values = [verdicts(group) for group in groups]
    flat = [value for group in values for value in group]
    total = sum(len(group.completions) for group in groups)
    outcomes = Counter(score.outcome for group in groups for score in group.scores)
    eligible = [group for group in values if len(group) >= 2]
    tied = sum(len(set(group)) < len(group) for group in eligible)
    uniform = sum(len(set(group)) == 1 for group in eligible)
    fields: Fields = {"mean_reward": float(np.mean(flat)), **quantiles("reward", flat)} if flat else {}
    return fields | {
        "correct_rate": sum(num_correct(group) for group in groups) / total,
        "no_verdict_count": outcomes[Outcome.NO_VERDICT],
        "failed_score_count": outcomes[Outcome.FAILED],
        "reward_tie_eligible_groups": len(eligible),
        "reward_tie_groups": tied,
        "reward_uniform_groups": uniform,
        "reward_tie_group_rate": _rate(tied, len(eligible)),
        "reward_uniform_group_rate": _rate(uniform, len(eligible)),
        "reward_tie_pair_rate": _rate(
            sum(map(_tied_pairs, eligible)), sum(len(g) * (len(g) - 1) // 2 for g in eligible)
        ),
        "reward_unique_fraction_mean": float(np.mean([len(set(g)) / len(g) for g in eligible])) if eligible else 0.0,
    }


def group_metrics(statuses: Sequence[GroupStatus]) -> Fields:
    """How many groups were useful, and why the others were not."""
    counts = Counter(statuses)
    return {
        "useful_groups": counts[GroupStatus.INFORMATIVE],
        "all_right_groups": counts[GroupStatus.ALL_RIGHT],
        "all_wrong_groups": counts[GroupStatus.ALL_WRONG],
        "tied_groups": counts[GroupStatus.TIED],
        "no_verdict_groups": counts[GroupStatus.NO_VERDICT],
    }


def length_metrics(groups: Sequence[Group]) -> Fields:
    """Completion lengths in tokens, before any masking, and the share of truncated completions."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([completion.num_actions for completion in completions])
    cut = sum(completion.stop_reason is StopReason.LENGTH for completion in completions)
    return {
        "max_token_hit_rate": cut / len(completions),
        "mean_tokens": float(lengths.mean()),
        "max_tokens_seen": int(lengths.max()),
        "sampled_tokens": int(lengths.sum()),
    }


def quantiles(name: str, values: Sequence[float]) -> dict[str, float]:
    """`{name}_p10`, `_p50`, `_p90`: the smallest of `values` that at least 10, 50 and 90 % of them do not exceed."""
    ordered = sorted(values)
    return {f"{name}_p{percent}": float(ordered[-(-percent * len(ordered) // 100) - 1]) for percent in PERCENTILES}


def _tied_pairs(values: Sequence[float]) -> int:
    return sum(count * (count - 1) // 2 for count in Counter(values).values())


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
