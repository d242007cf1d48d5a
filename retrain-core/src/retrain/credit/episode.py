"""Advantages of a step: by group, over the whole step or by token, then normalised over the step and clipped.

`_PG` one array per group, with one entry per judged completion; by token, one array per completion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from retrain.credit.checks import as_numbers, call_part, check_count, refusal
from retrain.credit.specs import AdvantageContext, StepAdvantageContext, TokenAdvantageContext
from retrain.kernel.types import Floats, Mask, Tokens

if TYPE_CHECKING:
    from retrain.credit.flow import CreditFlow

NORM_EPS = 1e-8
ROUNDING = 1e-12  # of the largest number: a mean below it is 0 up to rounding


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CreditGroup:
    """One group as credit sees it: ragged arrays over action tokens only.

    `named_rewards` holds the rewards behind `rewards_G` by name, where there are several and every completion has them;
    `shaping_G` is what shapers added to `rewards_G`, None for nothing.
    `tokens_G`, `texts_G` and `token_rewards_G` are there when the flow asks for them. A reward is NaN where there is
    no verdict, which only an advantage that needs none is shown.
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
    name: str = ""


def named_rewards(parts_G: Sequence[Mapping[str, float]]) -> dict[str, Floats]:
    """One array per name, of the names that every completion has."""
    shared = [name for name in (parts_G[0] if parts_G else ()) if all(name in parts for parts in parts_G)]
    return {name: np.array([parts[name] for parts in parts_G], dtype=np.float64) for name in shared}


def step_advantages(
    groups: Sequence[CreditGroup], flow: CreditFlow, trained: Sequence[bool]
) -> Sequence[Floats | Sequence[Floats]]:
    """One checked array of advantages per group, or one per completion of each where the advantage is by token.

    An advantage of groups is asked about the `trained` ones; the others get zeros. One of steps is asked about all.
    """
    if flow.advantage.compute_tokens is not None:
        by_token_PG = [
            _by_token(group, flow) if is_trained else [np.zeros(len(logprobs)) for logprobs in group.logprobs_G]
            for group, is_trained in zip(groups, trained, strict=True)
        ]
        flat = iter(_limited([advs_T for advs_G in by_token_PG for advs_T in advs_G], flow))
        return [tuple(islice(flat, len(advs_G))) for advs_G in by_token_PG]
    if flow.advantage.compute_step is None:
        advs_PG = [
            episode_advantages(group.rewards_G, flow, name=group.name) if is_trained else np.zeros(len(group.rewards_G))
            for group, is_trained in zip(groups, trained, strict=True)
        ]
    else:
        advs_PG = _from_step(groups, flow)
    return _limited(advs_PG, flow)


def episode_advantages(rewards_G: Floats, flow: CreditFlow, *, name: str = "") -> Floats:
    """One advantage per completion of a group, by an advantage that sees one group, checked."""
    rewards_G = as_numbers(rewards_G, len(rewards_G), what=f"{name}: reward")
    what = f"{name}: advantage {flow.advantage.name!r}"
    context = AdvantageContext(rewards_G=rewards_G, params=flow.advantage_params)
    return as_numbers(call_part(flow.advantage.compute, context, what), len(rewards_G), what=what)


def normalised(values_PG: Sequence[Floats]) -> list[Floats]:
    """(x - mean) / (std + 1e-8) over all completions or tokens of the step, std with ddof 0; zeros if all are equal."""
    flat = np.concatenate([np.zeros(0), *values_PG])
    if not flat.size or flat.min() == flat.max():
        return [np.zeros(values_G.shape) for values_G in values_PG]
    mean = float(flat.mean())
    if abs(mean) <= ROUNDING * np.abs(flat).max():
        mean = 0.0  # centred already: a residue would give groups without information some credit
    return [(values_G - mean) / (flat.std() + NORM_EPS) for values_G in values_PG]


def _limited(advantages: list[Floats], flow: CreditFlow) -> list[Floats]:
    """The arrays after `batch_norm` and `advantage_clip`."""
    if flow.batch_norm:
        advantages = normalised(advantages)
    if flow.advantage_clip > 0.0:
        advantages = [np.clip(each, -flow.advantage_clip, flow.advantage_clip) for each in advantages]
    return advantages


def _by_token(group: CreditGroup, flow: CreditFlow) -> list[Floats]:
    """One array per completion, with a number per action token, checked."""
    lengths, what = [len(logprobs) for logprobs in group.logprobs_G], f"{group.name}: advantage {flow.advantage.name!r}"
    context = TokenAdvantageContext(
        token_rewards_G=group.token_rewards_G or [np.zeros(length) for length in lengths],
        logprobs_G=group.logprobs_G,
        rewards_G=as_numbers(group.rewards_G, len(lengths), what=f"{group.name}: reward")
        if flow.advantage.needs_verdict
        else None,
        params=flow.advantage_params,
    )
    advs_G = call_part(flow.advantage.compute_tokens, context, what)
    check_count(advs_G, len(lengths), what=f"{what} output")
    return [
        as_numbers(advs_T, length, what=f"{what} completion {i}")
        for i, (advs_T, length) in enumerate(zip(advs_G, lengths, strict=True))
    ]


def _from_step(groups: Sequence[CreditGroup], flow: CreditFlow) -> list[Floats]:
    context = StepAdvantageContext(
        rewards_PG=[as_numbers(g.rewards_G, len(g.rewards_G), what=f"{g.name}: reward") for g in groups],
        lengths_PG=[np.array([len(logprobs) for logprobs in g.logprobs_G], dtype=np.int64) for g in groups],
        named_rewards_PG=[g.named_rewards for g in groups],
        shaping_PG=[np.zeros(len(g.rewards_G)) if g.shaping_G is None else g.shaping_G for g in groups],
        reward_weights=flow.reward_weights,
        params=flow.advantage_params,
    )
    what = f"advantage {flow.advantage.name!r}"
    advs_PG = call_part(flow.advantage.compute_step, context, what)
    if not hasattr(advs_PG, "__len__") or len(advs_PG) != len(groups):
        got = f"{len(advs_PG)} entries" if hasattr(advs_PG, "__len__") else type(advs_PG).__name__
        raise refusal(f"{what} returned {got}, expected {len(groups)}, one per group")
    return [
        as_numbers(advs_G, len(group.rewards_G), what=f"{group.name}: {what}")
        for group, advs_G in zip(groups, advs_PG, strict=True)
    ]
