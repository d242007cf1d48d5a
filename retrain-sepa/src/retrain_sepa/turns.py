"""Advantages by turn, shared by its sampled tokens; `_GK` one array per episode of a group, one entry per turn."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from functools import partial
from typing import Literal

import numpy as np

from retrain.advantages import AdvantageSpec, TokenAdvantageContext
from retrain.api import Floats, Table, key
from retrain_sepa.advantages import returns

STD_EPS = 1e-6


class TurnReturnParams(Table):
    gamma: float = key(1.0, "Discount of the next turn's return.", ge=0.0, le=1.0)


class GigpoParams(Table):
    gamma: float = key(0.95, "Discount of the next turn's return.", ge=0.0, le=1.0)
    omega: float = key(1.0, "Weight of the comparison of turns that began in the same state.", ge=0.0)
    scale: Literal["", "std"] = key("", 'Divide the episode\'s part by the deviation of the group: "std"; empty = no.')


def turn_return_advantages(rewards_GK: Sequence[Floats], *, gamma: float = 1.0) -> list[Floats]:
    """A_k = G_k - mean of the group's G_k, G_k = r_k + gamma G_(k+1); 0 for a turn that only one episode reaches."""
    returns_GK = [returns(rewards_K, gamma) for rewards_K in rewards_GK]
    return _centred(returns_GK, [range(len(returns_K)) for returns_K in returns_GK])


def gigpo_advantages(
    rewards_GK: Sequence[Floats],
    states_GK: Sequence[Sequence[str]],
    gamma: float = 0.95,
    omega: float = 1.0,
    scale: str = "",
) -> list[Floats]:
    """A_k = (R - mean R) + omega (G_k - mean of the group's returns from the same state), arXiv:2505.10978.

    R is the sum of an episode's rewards. `scale="std"` divides the first term by (std + 1e-6), ddof 1; the second is
    never divided. A state seen once, or unknown (""), adds nothing. If no episode has a second turn, the second term is
    left out: it would be the first one again.
    """
    totals_G = np.array([rewards_K.sum() for rewards_K in rewards_GK], dtype=np.float64)
    (episode_G,) = _centred([totals_G], [[0] * len(totals_G)])
    if scale == "std" and episode_G.any():
        episode_G = episode_G / (totals_G.std(ddof=1) + STD_EPS)
    if all(len(rewards_K) < 2 for rewards_K in rewards_GK):
        return [np.full(len(rewards_K), a) for rewards_K, a in zip(rewards_GK, episode_G, strict=True)]
    returns_GK = [returns(rewards_K, gamma) for rewards_K in rewards_GK]
    # A key of its own for an unknown state.
    keys_GK = [[state or (g, k) for k, state in enumerate(states_K)] for g, states_K in enumerate(states_GK)]
    steps_GK = _centred(returns_GK, keys_GK)
    return [episode + omega * step_K for episode, step_K in zip(episode_G, steps_GK, strict=True)]


def _centred(values_GK: Sequence[Floats], keys_GK: Sequence[Sequence[Hashable]]) -> list[Floats]:
    """Return each value minus the mean of all values with its key; exactly 0 where these are equal."""
    found: dict[Hashable, list[float]] = defaultdict(list)
    for values_K, keys_K in zip(values_GK, keys_GK, strict=True):
        for value, each in zip(values_K.tolist(), keys_K, strict=True):
            found[each].append(value)
    # The mean of equal values is rounded, and its residue would be credit.
    means = {each: values[0] if min(values) == max(values) else np.mean(values) for each, values in found.items()}
    pairs = zip(values_GK, keys_GK, strict=True)
    return [values_K - np.array([means[each] for each in keys_K], np.float64) for values_K, keys_K in pairs]


def _by_token(name: str, ctx: TokenAdvantageContext) -> list[Floats]:
    assert ctx.rewards_G is not None, "these advantages need verdicts"
    rewards_GK = [turns.rewards_of(float(r)) for turns, r in zip(ctx.turns_G, ctx.rewards_G, strict=True)]
    if name == "turn_return":
        advs_GK = turn_return_advantages(rewards_GK, **ctx.params)
    else:
        states_GK = [turns.states or ("",) * len(turns.lengths) for turns in ctx.turns_G]
        advs_GK = gigpo_advantages(rewards_GK, states_GK, **ctx.params)
    return [np.repeat(advs_K, turns.lengths) for advs_K, turns in zip(advs_GK, ctx.turns_G, strict=True)]


TURN_RETURN, GIGPO = (
    AdvantageSpec(name=name, compute_tokens=partial(_by_token, name), needs_group=True, by_turn=True)
    for name in ("turn_return", "gigpo")
)
