"""The curves of a report: fields, order, titles and units."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum

from retrain.records.runs.metric import HELD_OUT, HELD_OUT_REWARD, eval_sets
from retrain.tasks.scoring.verdict import part_fields
from retrain.text.amounts import ABSENT, percent

GROUPS = ("useful_groups", "all_right_groups", "all_wrong_groups", "tied_groups", "no_verdict_groups", "surplus_groups")
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

    With `is_graded` it is drawn only if some reward is graded: with 0 and 1 alone, rates tell the same. With
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


LEARNING, UNCERTAINTY, COMPLETIONS, UPDATE, WARM_UP, SPEED = (
    "Learning",
    "Uncertainty",
    "Completions",
    "Update",
    "Warm-up",
    "Speed",
)
CHARTS: Mapping[str, tuple[ChartSpec, ...]] = {
    LEARNING: (
        ChartSpec(
            title="Held-out correct rate",
            note="on examples that are never trained on",
            fields=(HELD_OUT.field,),
            unit=Unit.SHARE,
            is_eval=True,
        ),
        ChartSpec(
            title="Correct rate, training batches",
            note="each step has other prompts",
            fields=("correct_rate",),
            unit=Unit.SHARE,
        ),
        ChartSpec(
            title="Held-out correct rate by the shadow",
            note="a verifier that is never trained",
            fields=("eval_shadow_rate",),
            unit=Unit.SHARE,
            is_eval=True,
        ),
        ChartSpec(
            title="Correct rate by the shadow, training batches",
            note="a verifier that is never trained",
            fields=("shadow_correct_rate",),
            unit=Unit.SHARE,
        ),
        ChartSpec(title="Held-out pass@k", note="largest k", fields=(PASS_PREFIX,), unit=Unit.SHARE, is_eval=True),
        ChartSpec(
            title="Held-out mean reward",
            note="over completions with a verdict",
            fields=(HELD_OUT_REWARD.field,),
            is_eval=True,
            is_graded=True,
        ),
        ChartSpec(title="Mean reward", note="over completions with a verdict", fields=("mean_reward",)),
        *(
            ChartSpec(
                title=title,
                note="over the step's completions with a verdict",
                fields=(field,),
                is_graded=True,
                scale="reward",
            )
            for field, title in REWARD_QUANTILES.items()
        ),
    ),
    UNCERTAINTY: (
        ChartSpec(
            title="Variance before pooling",
            note="uncertainty of execution tokens",
            fields=("exec_surprisal_var", "exec_uncertainty_var"),
            is_pooling=True,
            scale="pooling",
        ),
        ChartSpec(
            title="Variance after pooling",
            note="what the credit of execution tokens is computed from",
            fields=("post_exec_surprisal_var", "post_exec_uncertainty_var"),
            is_pooling=True,
            scale="pooling",
        ),
        ChartSpec(
            title="Planning tokens, variance after pooling",
            note="pooling leaves them as they are",
            fields=("post_plan_surprisal_var", "post_plan_uncertainty_var"),
            is_pooling=True,
        ),
        ChartSpec(
            title="Entropy of execution tokens",
            note="nats per token; surprisal where no entropy is known",
            fields=("exec_entropy_mean", "exec_surprisal_mean"),
        ),
        ChartSpec(
            title="Entropy of planning tokens",
            note="nats per token; surprisal where no entropy is known",
            fields=("plan_entropy_mean", "plan_surprisal_mean"),
        ),
        ChartSpec(title="SEPA lambda", note="0: no pooling, 1: full pooling", fields=("sepa_lambda",), is_pooling=True),
    ),
    COMPLETIONS: (
        ChartSpec(title="Mean length", note="tokens per completion", fields=("mean_tokens",)),
        ChartSpec(
            title="Truncated", note="completions cut off at max_tokens", fields=("max_token_hit_rate",), unit=Unit.SHARE
        ),
        ChartSpec(title="Useful groups", note="whose rewards differ", fields=("useful_groups",), unit=Unit.SHARE),
        ChartSpec(title="Trained tokens", note="of all sampled ones", fields=("trained_tokens",), unit=Unit.SHARE),
    ),
    UPDATE: (
        ChartSpec(title="Gradient norm", note="", fields=("grad_norm",)),
        ChartSpec(title="Loss", note="of a policy gradient: not a measure of quality", fields=("loss",)),
        ChartSpec(
            title="Log-probability gap, mean", note="trainer against sampler, nats", fields=("logprob_gap_mean",)
        ),
        ChartSpec(
            title="Log-probability gap, 99th percentile",
            note="trainer against sampler, nats",
            fields=("logprob_gap_p99",),
        ),
        ChartSpec(
            title="Effective sample size", note="1: sampler and trainer agree", fields=("ess_frac",), unit=Unit.SHARE
        ),
        ChartSpec(title="k3", note="estimate of the KL divergence, trainer to sampler", fields=("k3",)),
        ChartSpec(title="Clipped", note="action tokens", fields=("clip_fraction",), unit=Unit.SHARE),
        ChartSpec(title="Learning rate", note="of the step", fields=("lr",)),
        ChartSpec(title="KL to the reference", note="k3 per token, nats", fields=("kl_mean",)),
        ChartSpec(title="KL coefficient", note="", fields=("kl_coef",)),
    ),
    WARM_UP: (
        ChartSpec(
            title="Supervised loss",
            note="of the answers' tokens, nats; by supervised steps",
            fields=("sft_loss",),
            is_warm_up=True,
        ),
        ChartSpec(
            title="Supervised learning rate",
            note="by supervised steps",
            fields=("sft_lr",),
            is_warm_up=True,
        ),
    ),
    SPEED: (
        ChartSpec(title="Time per step", note="seconds", fields=("step_time_s",), unit=Unit.SECONDS),
        ChartSpec(title="Sampling speed", note="tokens per second", fields=("sampled_tokens",)),
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
    """A chart for each part of the reward among `fields`, in training batches and held out; of the first parts only."""
    names = tuple(fields)
    specs = []
    for prefix, note in (("", "unweighted, training batches"), ("eval_", "unweighted, held out")):
        for name, field in list(part_fields(names, prefix).items())[:MOST_PARTS]:
            specs.append(ChartSpec(title=f"Part {name}", note=note, fields=(field,), is_eval=bool(prefix)))
    return specs


def set_charts(fields: Iterable[str]) -> list[ChartSpec]:
    """A chart for each further evaluation set among `fields`."""
    found, note = eval_sets(sorted(fields)), "correct rate on a further evaluation set"
    return [ChartSpec(title=n, note=note, fields=(f,), unit=Unit.SHARE, is_eval=True) for n, f in found.items()]


def value_text(value: float | None, unit: Unit = Unit.NUMBER) -> str:
    """Format a value of a chart."""
    if value is None or not math.isfinite(value):
        return ABSENT
    if unit is Unit.SHARE:
        return percent(value)
    return f"{value:.3g} s" if unit is Unit.SECONDS else f"{value:.4g}"
