"""The curves of a report: fields, order, titles and units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

from retrain.records.run import TASK_RATE, eval_sets
from retrain.records.runs.curves import HELD_OUT, HELD_OUT_REWARD
from retrain.tasks.scoring.verdict import part_fields
from retrain.text.amounts import ABSENT, percent

GROUPS = ("useful_groups", "all_right_groups", "all_wrong_groups", "tied_groups", "no_verdict_groups", "surplus_groups")
# Charts show these counts as ratios: each divided by the sum of other fields.
RATIOS: Mapping[str, tuple[str, ...]] = {
    "useful_groups": GROUPS,
    "trained_tokens": ("sampled_tokens",),
    "sampled_tokens": ("sample_time_s",),
}
TIMES = ("sample_time_s", "score_time_s", "train_time_s")
LOW, HIGH = "eval_ci_low", "eval_ci_high"
PASS_PREFIX = "eval_pass_at_"
REWARD_QUANTILES = {
    "reward_p10": "Reward, 10th percentile",
    "reward_p50": "Reward, median",
    "reward_p90": "Reward, 90th percentile",
}
MOST_PARTS = 8


class Unit(StrEnum):
    """Unit of a chart: the format of its values and its axis."""

    SHARE = "share"
    NUMBER = "number"
    SECONDS = "seconds"


@dataclass(frozen=True, slots=True, kw_only=True)
class ChartSpec:
    """One chart: the first of `fields` that the runs have. Charts with the same `scale` share a vertical axis.

    With `is_graded` it is drawn only if some reward is neither 0 nor 1: otherwise rates show the same. With
    `is_warm_up` it counts the supervised steps before the first one. With `is_pooling` it is drawn only if some run
    pools uncertainties.
    """

    title: str
    note: str
    fields: tuple[str, ...]
    unit: Unit = Unit.NUMBER
    is_eval: bool = False
    is_graded: bool = False
    is_warm_up: bool = False
    is_pooling: bool = False
    scale: str = ""


def _chart(title: str, note: str, *fields: str, unit: Unit = Unit.NUMBER, scale: str = "", **kinds: bool) -> ChartSpec:
    return ChartSpec(title=title, note=note, fields=fields, unit=unit, scale=scale, **kinds)


_share = partial(_chart, unit=Unit.SHARE)
_held_out_share = partial(_share, is_eval=True)
_pooling = partial(_chart, is_pooling=True)
_GAP, _ENTROPY = "trainer against sampler, nats", "nats per token; surprisal where no entropy is known"
_SHADOW, _JUDGED = "a verifier that is never trained", "over completions with a verdict"
LEARNING = "Learning"
CHARTS: Mapping[str, tuple[ChartSpec, ...]] = {
    LEARNING: (
        _held_out_share("Held-out correct rate", "on examples that are never trained on", HELD_OUT.field),
        _share("Correct rate, training batches", "each step has other prompts", "correct_rate"),
        _share("Correct rate, mean over tasks", "training batches; macro", "macro_correct_rate"),
        _held_out_share("Held-out correct rate by the shadow", _SHADOW, "eval_shadow_rate"),
        _share("Correct rate by the shadow, training batches", _SHADOW, "shadow_correct_rate"),
        _held_out_share("Held-out pass@k", "largest k", PASS_PREFIX),
        _chart("Held-out mean reward", _JUDGED, HELD_OUT_REWARD.field, is_eval=True, is_graded=True),
        _chart("Mean reward", _JUDGED, "mean_reward"),
        *(_chart(title, _JUDGED, field, is_graded=True, scale="reward") for field, title in REWARD_QUANTILES.items()),
    ),
    "Uncertainty": (
        _pooling(
            "Variance before pooling",
            "uncertainty of execution tokens",
            *("exec_surprisal_var", "exec_uncertainty_var"),
            scale="pooling",
        ),
        _pooling(
            "Variance after pooling",
            "the credit of execution tokens is computed from it",
            *("post_exec_surprisal_var", "post_exec_uncertainty_var"),
            scale="pooling",
        ),
        _pooling(
            "Planning tokens, variance after pooling",
            "unchanged by pooling",
            *("post_plan_surprisal_var", "post_plan_uncertainty_var"),
        ),
        _chart("Entropy of execution tokens", _ENTROPY, "exec_entropy_mean", "exec_surprisal_mean"),
        _chart("Entropy of planning tokens", _ENTROPY, "plan_entropy_mean", "plan_surprisal_mean"),
        _pooling("SEPA lambda", "0: no pooling, 1: full pooling", "sepa_lambda"),
    ),
    "Completions": (
        _chart("Mean length", "tokens per completion", "mean_tokens"),
        _share("Truncated", "completions cut off at max_tokens", "max_token_hit_rate"),
        _share("Useful groups", "whose rewards differ", "useful_groups"),
        _share("Trained tokens", "of all sampled ones", "trained_tokens"),
    ),
    "Update": (
        _chart("Gradient norm", "", "grad_norm"),
        _chart("Loss", "of a policy gradient: not a measure of quality", "loss"),
        _chart("Log-probability gap, mean", _GAP, "logprob_gap_mean"),
        _chart("Log-probability gap, 99th percentile", _GAP, "logprob_gap_p99"),
        _share("Effective sample size", "1: sampler and trainer agree", "ess_frac"),
        _chart("k3", "estimate of the KL divergence, trainer to sampler", "k3"),
        _share("Clipped", "action tokens", "clip_fraction"),
        _chart("Learning rate", "of the step", "lr"),
        _chart("KL to the reference", "k3 per token, nats", "kl_mean"),
        _chart("KL coefficient", "", "kl_coef"),
    ),
    "Warm-up": (
        _chart("Supervised loss", "of the answers' tokens, nats; by supervised steps", "sft_loss", is_warm_up=True),
        _chart("Supervised learning rate", "by supervised steps", "sft_lr", is_warm_up=True),
    ),
    "Speed": (
        _chart("Time per step", "seconds", "step_time_s", unit=Unit.SECONDS),
        _chart("Sampling speed", "tokens per second", "sampled_tokens"),
    ),
}
FIELDS = tuple(
    dict.fromkeys(
        (
            *(field for specs in CHARTS.values() for spec in specs for field in spec.fields if field != PASS_PREFIX),
            *(*GROUPS, *TIMES, LOW, HIGH, "eval_time_s", "entropy_mask_fraction"),
        )
    )
)


def part_charts(fields: Iterable[str]) -> list[ChartSpec]:
    """Return a chart for each of the first parts of the reward among `fields`, in training batches and held out."""
    names = tuple(fields)
    specs = []
    for prefix, note in (("", "unweighted, training batches"), ("eval_", "unweighted, held out")):
        for name, field in list(part_fields(names, prefix).items())[:MOST_PARTS]:
            specs.append(_chart(f"Part {name}", note, field, is_eval=bool(prefix)))
    return specs


def set_charts(fields: Iterable[str]) -> list[ChartSpec]:
    found, note = eval_sets(sorted(fields)), "correct rate on a further evaluation set"
    return [_held_out_share(name, note, field) for name, field in found.items()]


def task_charts(fields: Iterable[str]) -> list[ChartSpec]:
    """Return the charts of each of `[[data.tasks]]`, by its rate among `fields`."""
    tasks = [found[1] for field in sorted(fields) if (found := TASK_RATE.fullmatch(field))]
    rates = [_share(f"{each}, training batches", "of this task", f"task_{each}_correct_rate") for each in tasks]
    return [*rates, *(_share(f"{each}, share", "of a step's prompts", f"task_{each}_share") for each in tasks)]


def named_fields(record: Mapping[str, Any]) -> list[str]:
    """Return the chart fields that depend on the run: pass@k, parts of the reward, evaluation sets."""
    passes = [name for name in record if name.startswith(PASS_PREFIX)]
    return [*passes, *part_fields(record).values(), *part_fields(record, "eval_").values(), *eval_sets(record).values()]


def value_text(value: float | None, unit: Unit = Unit.NUMBER) -> str:
    if value is None or not math.isfinite(value):
        return ABSENT
    if unit is Unit.SHARE:
        return percent(value)
    return f"{value:.3g} s" if unit is Unit.SECONDS else f"{value:.4g}"
