"""The step's line in `metrics.jsonl`, field by field, from what the step produced."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from retrain.kernel.informative import GroupStatus, num_correct, verdicts
from retrain.kernel.types import Floats, Group, Mask, Outcome, StopReason, TrainReport
from retrain.rooms.credit.batch import Credited

Fields = dict[str, Any]


def reward_metrics(groups: Sequence[Group]) -> Fields:
    """Rates over all completions of the step, trained or not; `mean_reward` is absent without any verdict.

    A group is eligible for ties when two completions have a score; it is tied when at least two scores are equal.
    """
    values = [verdicts(group) for group in groups]
    flat = [value for group in values for value in group]
    total = sum(len(group.completions) for group in groups)
    outcomes = Counter(score.outcome for group in groups for score in group.scores)
    eligible = [group for group in values if len(group) >= 2]
    tied = sum(len(set(group)) < len(group) for group in eligible)
    uniform = sum(len(set(group)) == 1 for group in eligible)
    fields: Fields = {"mean_reward": float(np.mean(flat))} if flat else {}
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
    """Completion lengths in tokens, before any masking, and the share that was cut off."""
    completions = [completion for group in groups for completion in group.completions]
    lengths = np.array([completion.num_actions for completion in completions])
    cut = sum(completion.stop_reason is StopReason.LENGTH for completion in completions)
    return {
        "max_token_hit_rate": cut / len(completions),
        "mean_tokens": float(lengths.mean()),
        "max_tokens_seen": int(lengths.max()),
        "sampled_tokens": int(lengths.sum()),
    }


def token_metrics(credited: Credited, uncertainty: str) -> Fields:
    """Mean and variance of uncertainty over execution and planning tokens, before and after pooling.

    `surprisal` is -log p of the sampled tokens, `entropy` that of the sampling distribution; `post_*` is the configured
    uncertainty after pooling. A field is absent when there is no such token.
    """
    planning = _flat(credited.planning, np.bool_)
    actions = [[c.logprobs_T[c.action_T] for c in group] for group in credited.judged]
    fields: Fields = _split("surprisal", -_flat(actions, np.float64), planning)
    if all(c.entropies_T is not None for group in credited.judged for c in group):
        entropies = [[c.entropies_T[c.action_T] for c in g if c.entropies_T is not None] for g in credited.judged]
        fields |= _split("entropy", _flat(entropies, np.float64), planning)
    kind = "surprisal" if uncertainty == "surprisal" else "uncertainty"
    pooled = _split(kind, _flat(credited.result.pooled, np.float64), planning)
    return fields | {f"post_{name}": value for name, value in pooled.items()}


def execution_variance(credited: Credited) -> float | None:
    """Pooled variance of the configured uncertainty over the step's execution tokens, before pooling."""
    values = _flat(credited.result.uncertainties, np.float64)[~_flat(credited.planning, np.bool_)]
    return float(values.var()) if values.size else None


def train_metrics(report: TrainReport | None) -> Fields:
    """What the optimizer step reported; no loss (null) and no ratios when there was nothing to train."""
    if report is None:
        return {"loss": None, "reported_loss": None, "loss_is_placeholder": False, "trained_tokens": 0}
    measured = {
        "grad_norm": report.grad_norm,
        "ratio_mean": report.ratio_mean,
        "ratio_max": report.ratio_max,
        "logprob_gap_mean": report.gap_mean,
        "logprob_gap_p99": report.gap_p99,
        "logprob_gap_max": report.gap_max,
        "k3": report.k3,
        "ess_frac": report.ess_frac,
        "clip_fraction": report.clip_fraction,
    }
    return {
        "loss": report.loss,
        "reported_loss": report.loss,
        "loss_is_placeholder": report.loss_is_placeholder,
        "trained_tokens": report.num_tokens,
        **{name: value for name, value in measured.items() if value is not None},
    }


def _split(name: str, values: Floats, planning: Mask) -> dict[str, float]:
    fields: dict[str, float] = {}
    for part, chosen in (("exec", values[~planning]), ("plan", values[planning])):
        if chosen.size:
            fields |= {f"{part}_{name}_mean": float(chosen.mean()), f"{part}_{name}_var": float(chosen.var())}
    return fields


def _flat(groups: Sequence[Sequence[np.ndarray]], dtype: type) -> np.ndarray:
    arrays = [array for group in groups for array in group]
    return np.concatenate(arrays).astype(dtype, copy=False) if arrays else np.zeros(0, dtype)


def _tied_pairs(values: Sequence[float]) -> int:
    return sum(count * (count - 1) // 2 for count in Counter(values).values())


def _rate(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
