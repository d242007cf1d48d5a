"""The credit pipeline of one step, straight down: uncertainty, pooling, advantage, weight, post-processing, mask.

`_PG` one array per group, `_G` one entry per judged completion of a group, `_T` one per action token of a completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np

from retrain.credit.checks import as_arrays, as_numbers, call_part, check_count, numbers_from, refusal
from retrain.credit.flow import GTPO, HICRA, TOP_RHO, CreditFlow
from retrain.credit.specs import (
    AdvantageContext,
    StepAdvantageContext,
    TokenAdvantageContext,
    TransformContext,
    TransformOutput,
    UncertaintyContext,
)
from retrain.kernel.errors import CreditError, Problem
from retrain.kernel.types import Floats, Mask, Tokens, Turns

Arrays = tuple[Floats, ...]  # one per completion, action tokens only
# The deviation can be tiny, though not 0, when advantages differ only by rounding.
NORM_EPS = 1e-8
# Relative to the largest number: a smaller mean is the rounding residue of advantages that are centred already.
ROUNDING = 1e-12


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditGroup:
    """One group as credit sees it: ragged arrays over action tokens only.

    `named_rewards` holds the rewards behind `rewards_G` by name, where there are several and every completion has them;
    `shaping_G` is the part of `rewards_G` that shapers added, None for nothing. `tokens_G`, `texts_G` and
    `token_rewards_G` are only there if the flow needs them. A reward is NaN without a verdict; only an advantage that
    needs none sees that. `greedy` is the reward of the greedy completion, NaN without a verdict; None = not sampled.
    """

    rewards_G: Floats
    logprobs_G: Sequence[Floats]
    planning_G: Sequence[Mask]
    entropies_G: Sequence[Floats] | None = None
    named_rewards: Mapping[str, Floats] = field(default_factory=dict)
    shaping_G: Floats | None = None
    tokens_G: Sequence[Tokens] | None = None
    texts_G: Sequence[Sequence[str]] | None = None
    token_rewards_G: Sequence[Floats] | None = None
    squared_probs_G: Sequence[Floats] | None = None
    greedy: float | None = None
    turns_G: Sequence[Turns] = ()
    name: str = ""
    task: str = ""  # among those that are normalised by themselves


def named_rewards(parts_G: Sequence[Mapping[str, float]]) -> dict[str, Floats]:
    shared = [name for name in (parts_G[0] if parts_G else ()) if all(name in parts for parts in parts_G)]
    return {name: np.array([parts[name] for parts in parts_G], dtype=np.float64) for name in shared}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditResult:
    """Token advantages per group and completion, uncertainties before and after pooling, and metrics to log.

    `trained[p]` says whether group p is to be trained.
    """

    token_advs: tuple[Arrays, ...]
    uncertainties: tuple[Arrays, ...]
    pooled: tuple[Arrays, ...]
    trained: tuple[bool, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)


def assign_credit(
    groups: Sequence[CreditGroup], flow: CreditFlow, *, sepa_lambda: float = 0.0, trained: Sequence[bool] | None = None
) -> CreditResult:
    """Token advantages for the groups of a step.

    Uncertainty is measured and pooled for every group; advantages are spread over the `trained` ones (all by default),
    and over those to which an advantage that sees the whole step gives any; they are zero in the others. The top-rho
    threshold is taken over all action tokens of the trained groups. CreditError for numbers that are not finite, and
    for plugin outputs of the wrong count or length; it names plugin, group, completion and position.
    """
    if flow.is_custom:
        what = f"algorithm {flow.name!r} assigns credit itself: it has no stages to compute"
        fix = "choose an algorithm that is made of stages"
        raise CreditError(Problem(code="credit.own-algorithm", what=what, fix=fix))
    chosen = [True] * len(groups) if trained is None else list(trained)
    # Untrained groups too: the controller and the log describe all tokens that were sampled.
    measured = [measure_uncertainty(group, flow) for group in groups]
    pooled = [_pool_group(group, u, flow, sepa_lambda) for group, u in zip(groups, measured, strict=True)]
    episode_PG: Sequence[Floats | Sequence[Floats]] = [group.rewards_G for group in groups]
    if not flow.whole:
        episode_PG = step_advantages(groups, flow, chosen)
        if flow.advantage.compute_step is not None or flow.advantage.by_turn:
            given = [any(np.any(adv) for adv in advs_G) for advs_G in episode_PG]
            chosen = [is_trained or has_any for is_trained, has_any in zip(chosen, given, strict=True)]
    token_advs: list[Arrays] = []
    extras: list[Mapping[str, float]] = []
    for group, episode_G, raw_G, pooled_G, is_trained in zip(groups, episode_PG, measured, pooled, chosen, strict=True):
        if not is_trained:
            token_advs.append(tuple(np.zeros(u.shape) for u in raw_G))
            continue
        advs_G, extra = _credit_group(group, episode_G, raw_G, pooled_G, flow, sepa_lambda)
        token_advs.append(advs_G)
        extras.append(extra)
    names = {name for extra in extras for name in extra}
    metrics = {name: float(np.mean([extra[name] for extra in extras if name in extra])) for name in sorted(names)}
    if flow.mask_rho > 0.0:
        counted = [u for raw_G, is_trained in zip(measured, chosen, strict=True) if is_trained for u in raw_G]
        # One threshold for the step, by the uncertainty before pooling: pooling makes execution tokens alike.
        threshold = float(call_part(f"stage {TOP_RHO!r}", flow.stages[TOP_RHO], counted, flow.mask_rho))
        token_advs, mask_metrics = _mask(token_advs, measured, chosen, threshold)
        metrics |= mask_metrics
    return CreditResult(
        token_advs=tuple(token_advs),
        uncertainties=tuple(measured),
        pooled=tuple(pooled),
        trained=tuple(chosen),
        metrics=metrics,
    )


def measure_uncertainty(group: CreditGroup, flow: CreditFlow) -> Arrays:
    """The configured uncertainty of every action token of a group, checked finite and >= 0."""
    count = len(group.rewards_G)
    check_count(group.logprobs_G, count, what=f"{group.name}: log-probabilities")
    check_count(group.planning_G, count, what=f"{group.name}: planning masks")
    entropies_G: Sequence[Floats | None] = group.entropies_G or [None] * count
    if flow.needs_entropy and group.entropies_G is None:
        what = f"{group.name}: uncertainty {flow.uncertainty.name!r} needs entropies, and there are not any"
        fix = "give entropies_G, or use another uncertainty_kind"
        raise refusal(what, fix, code="backend.no-entropies")
    measured = []
    for i, (logprobs, planning, entropies) in enumerate(
        zip(group.logprobs_G, group.planning_G, entropies_G, strict=True)
    ):
        place = f"{group.name} completion {i}"
        logprobs_T = as_numbers(logprobs, len(logprobs), what=f"{place}: log-probability")
        if len(planning) != len(logprobs_T):
            what = f"{place}: planning mask has length {len(planning)}, expected {len(logprobs_T)}"
            raise refusal(what, "give one mark per sampled token", code="credit.wrong-mask")
        context = UncertaintyContext(
            logprobs_T=logprobs_T,
            entropies_T=None if entropies is None else np.asarray(entropies, dtype=np.float64),
            planning_T=np.asarray(planning, dtype=np.bool_),
            params=flow.transform_params,
        )
        what = f"{place}: uncertainty {flow.uncertainty.name!r}"
        uncertainty_T = numbers_from(what, len(logprobs_T), flow.uncertainty.compute, context)
        if uncertainty_T.size and uncertainty_T.min() < 0.0:
            position = int(np.argmax(uncertainty_T < 0.0))
            negative = f"{what} is {uncertainty_T[position]} at position {position}: it must not be negative"
            raise refusal(
                negative, "return a measure that is 0 for a certain token", code="credit.negative-uncertainty"
            )
        measured.append(uncertainty_T)
    return tuple(measured)


def step_advantages(
    groups: Sequence[CreditGroup], flow: CreditFlow, trained: Sequence[bool]
) -> Sequence[Floats | Sequence[Floats]]:
    """One checked array of advantages per group, or one per completion of each where the advantage is by token.

    An advantage that sees one group is called for the `trained` ones; the others get zeros. One of steps sees all.
    """
    if flow.advantage.compute_tokens is not None:
        by_token_PG = [
            _by_token(group, flow) if is_trained else [np.zeros(len(logprobs)) for logprobs in group.logprobs_G]
            for group, is_trained in zip(
                groups, [True] * len(groups) if flow.advantage.by_turn else trained, strict=True
            )
        ]
        tasks = [group.task for group, advs_G in zip(groups, by_token_PG, strict=True) for _ in advs_G]
        flat = iter(_limited([advs_T for advs_G in by_token_PG for advs_T in advs_G], tasks, flow))
        return [tuple(islice(flat, len(advs_G))) for advs_G in by_token_PG]
    if flow.advantage.compute_step is None:
        advs_PG = [
            episode_advantages(group.rewards_G, flow, name=group.name) if is_trained else np.zeros(len(group.rewards_G))
            for group, is_trained in zip(groups, trained, strict=True)
        ]
    else:
        advs_PG = _from_step(groups, flow)
    return _limited(advs_PG, [group.task for group in groups], flow)


def episode_advantages(rewards_G: Floats, flow: CreditFlow, *, name: str = "") -> Floats:
    """One advantage per completion of a group, by an advantage that sees one group, checked."""
    rewards_G = as_numbers(rewards_G, len(rewards_G), what=f"{name}: reward")
    what = f"{name}: advantage {flow.advantage.name!r}"
    context = AdvantageContext(rewards_G=rewards_G, params=flow.advantage_params)
    return numbers_from(what, len(rewards_G), flow.advantage.compute, context)


def normalised(values_PG: Sequence[Floats]) -> list[Floats]:
    """(x - mean) / (std + 1e-8) over all completions or tokens of the step, std with ddof 0; zeros if all are equal."""
    flat = np.concatenate([np.zeros(0), *values_PG])
    if not flat.size or flat.min() == flat.max():
        return [np.zeros(values_G.shape) for values_G in values_PG]
    mean = float(flat.mean())
    if abs(mean) <= ROUNDING * np.abs(flat).max():
        # A residue would give groups without information some credit.
        mean = 0.0
    return [(values_G - mean) / (flat.std() + NORM_EPS) for values_G in values_PG]


def _limited(advantages: list[Floats], tasks: Sequence[str], flow: CreditFlow) -> list[Floats]:
    if flow.batch_norm:
        by_task = {task: [n for n, each in enumerate(tasks) if each == task] for task in dict.fromkeys(tasks)}
        pairs = ((own, normalised([advantages[n] for n in own])) for own in by_task.values())
        found = {n: each for own, values in pairs for n, each in zip(own, values, strict=True)}
        advantages = [found[n] for n in range(len(advantages))]
    if flow.advantage_clip > 0.0:
        advantages = [np.clip(each, -flow.advantage_clip, flow.advantage_clip) for each in advantages]
    return advantages


def _by_token(group: CreditGroup, flow: CreditFlow) -> list[Floats]:
    lengths, what = [len(logprobs) for logprobs in group.logprobs_G], f"{group.name}: advantage {flow.advantage.name!r}"
    if flow.advantage.needs_squared_probs and group.squared_probs_G is None:
        lacking = f"{what} needs the trainer's squared probabilities, and there are not any"
        raise refusal(lacking, "use another advantage_mode", code="backend.no-squared-probs")
    context = TokenAdvantageContext(
        token_rewards_G=group.token_rewards_G or [np.zeros(length) for length in lengths],
        logprobs_G=group.logprobs_G,
        rewards_G=as_numbers(group.rewards_G, len(lengths), what=f"{group.name}: reward")
        if flow.advantage.needs_verdict
        else None,
        squared_probs_G=group.squared_probs_G or (),
        turns_G=group.turns_G or [Turns(lengths=(length,)) for length in lengths],
        params=flow.advantage_params,
    )
    return as_arrays(call_part(what, flow.advantage.compute_tokens, context), lengths, what=what)


def _from_step(groups: Sequence[CreditGroup], flow: CreditFlow) -> list[Floats]:
    what = f"advantage {flow.advantage.name!r}"
    if flow.advantage.needs_greedy and any(group.greedy is None for group in groups):
        lacking = f"{what} needs a greedy completion of each prompt, and there are not any"
        raise refusal(lacking, "use another advantage_mode", code="credit.no-greedy")
    context = StepAdvantageContext(
        rewards_PG=[as_numbers(g.rewards_G, len(g.rewards_G), what=f"{g.name}: reward") for g in groups],
        lengths_PG=[np.array([len(logprobs) for logprobs in g.logprobs_G], dtype=np.int64) for g in groups],
        named_rewards_PG=[g.named_rewards for g in groups],
        shaping_PG=[np.zeros(len(g.rewards_G)) if g.shaping_G is None else g.shaping_G for g in groups],
        greedy_P=np.array([np.nan if g.greedy is None else g.greedy for g in groups], dtype=np.float64),
        reward_weights=flow.reward_weights,
        params=flow.advantage_params,
    )
    advs_PG = call_part(what, flow.advantage.compute_step, context)
    check_count(advs_PG, len(groups), what=f"{what} output", each="group")
    return [
        as_numbers(advs_G, len(group.rewards_G), what=f"{group.name}: {what}")
        for group, advs_G in zip(groups, advs_PG, strict=True)
    ]


def _credit_group(
    group: CreditGroup,
    episode_G: Floats | Sequence[Floats],
    raw_G: Arrays,
    pooled_G: Arrays,
    flow: CreditFlow,
    sepa_lambda: float,
) -> tuple[Arrays, Mapping[str, float]]:
    """Token advantages and metrics of one group; `episode_G` has a number, or an array, per completion."""
    compute = flow.whole or flow.transform.compute_context
    if compute is not None:
        advantages_G = as_numbers(episode_G, len(group.rewards_G), what=f"{group.name}: reward")
        # A stage that no distribution provides keeps its documented default strength in the context.
        strengths = {"gtpo_beta": flow.gtpo_beta, "hicra_alpha": flow.hicra_alpha}
        context = TransformContext(
            advantages_G=advantages_G,
            rewards_G=np.asarray(group.rewards_G, dtype=np.float64),
            logprobs_G=[np.asarray(logprobs, dtype=np.float64) for logprobs in group.logprobs_G],
            uncertainties_G=raw_G,
            planning_masks_G=[np.asarray(planning, dtype=np.bool_) for planning in group.planning_G],
            entropies_G=group.entropies_G,
            tokens_G=group.tokens_G if flow.needs_text else None,
            texts_G=group.texts_G if flow.needs_text else None,
            token_rewards_G=group.token_rewards_G if flow.needs_token_rewards else None,
            sepa_lambda=sepa_lambda,
            params=flow.params if flow.algorithm else flow.transform_params,
            **{name: value for name, value in strengths.items() if value is not None},
        )
        what = f"{group.name}: {'algorithm' if flow.whole else 'transform'} {flow.name!r}"
        output = call_part(what, compute, context)
        advs, metrics = (output.token_advs, output.metrics) if isinstance(output, TransformOutput) else (output, {})
        for name, value in metrics.items():
            as_numbers([value], 1, what=f"{what} metric {name!r}")
        return tuple(as_arrays(advs, [len(u) for u in raw_G], what=what)), metrics
    advs_G = tuple(
        _spread(a, u, np.asarray(p, dtype=np.bool_), flow, f"{group.name} completion {i}")
        for i, (a, u, p) in enumerate(zip(episode_G, pooled_G, group.planning_G, strict=True))
    )
    return advs_G, {}


def _pool_group(group: CreditGroup, raw_G: Arrays, flow: CreditFlow, sepa_lambda: float) -> Arrays:
    pool = flow.transform.entropy_transform
    # A whole algorithm gets uncertainties as measured: pooling them is up to it.
    if pool is None or flow.whole:
        return raw_G
    pooled = []
    for i, (raw_T, planning) in enumerate(zip(raw_G, group.planning_G, strict=True)):
        what = f"{group.name} completion {i}: entropy_transform of {flow.transform.name!r}"
        planning_T = np.asarray(planning, dtype=np.bool_)
        pooled.append(numbers_from(what, len(raw_T), pool, raw_T, planning_T, sepa_lambda))
    return tuple(pooled)


def _spread(advantage: float | Floats, uncertainty_T: Floats, planning_T: Mask, flow: CreditFlow, place: str) -> Floats:
    transform, length, stages = flow.transform, len(uncertainty_T), flow.stages
    advs_T: Floats = np.full(length, advantage)
    if transform.use_gtpo:
        what = f"{place}: stage {GTPO!r}"
        advs_T = advantage * numbers_from(what, length, stages[GTPO], uncertainty_T, flow.gtpo_beta)
    # Second, because HICRA amplifies the advantage that the weight has left to a planning token.
    if transform.apply_hicra:
        what = f"{place}: stage {HICRA!r}"
        advs_T = numbers_from(what, length, stages[HICRA], advs_T, planning_T, flow.hicra_alpha)
    if transform.post_process is not None:
        what = f"{place}: post_process of {transform.name!r}"
        advs_T = numbers_from(what, length, transform.post_process, advs_T, planning_T, flow.transform_params)
    return advs_T


def _mask(
    advs: Sequence[Arrays], uncertainties: Sequence[Arrays], trained: Sequence[bool], threshold: float
) -> tuple[list[Arrays], dict[str, float]]:
    masked, kept, total = [], 0, 0
    for advs_G, uncertainties_G, is_trained in zip(advs, uncertainties, trained, strict=True):
        # Ties with the threshold stay, so that equal uncertainties are treated alike.
        keep_G = [u >= threshold for u in uncertainties_G]
        masked.append(tuple(np.where(keep, a, 0.0) for keep, a in zip(keep_G, advs_G, strict=True)))
        kept += sum(int(keep.sum()) for keep in keep_G) if is_trained else 0
        total += sum(keep.size for keep in keep_G) if is_trained else 0
    # An infinite threshold keeps every token, and JSON has no number for it.
    metrics = {"entropy_mask_fraction": kept / total if total else 1.0}
    return masked, metrics | ({"entropy_mask_threshold": threshold} if np.isfinite(threshold) else {})
