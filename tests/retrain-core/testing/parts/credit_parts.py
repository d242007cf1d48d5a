"""Advantages, transforms, uncertainties and algorithms: sound ones, and one for each way to be broken."""

from __future__ import annotations

import itertools
import random

import numpy as np

from retrain.advantages import AlgorithmSpec, TransformOutput, TransformSpec, UncertaintySpec

CALLS = itertools.count(1)


def centred(rewards):
    return [r - sum(rewards) / len(rewards) for r in rewards]


def sorted_ones(rewards):
    return sorted(centred(rewards))


def one_short(rewards):
    return centred(rewards)[:-1]


def divided_by_nothing(rewards):
    with np.errstate(invalid="ignore"):
        return (rewards - np.mean(rewards)) / np.std(rewards)


def in_place(rewards):
    rewards -= rewards.mean()
    return rewards.copy()


def noisy(rewards):
    return [r + random.random() for r in rewards]


def counting(rewards):
    return [r + next(CALLS) for r in rewards]


def spread(ctx):
    return TransformOutput(
        token_advs=[np.full(len(u), a) for a, u in zip(ctx.advantages_G, ctx.uncertainties_G, strict=True)]
    )


def one_token_short(ctx):
    return [np.full(max(len(u) - 1, 0), a) for a, u in zip(ctx.advantages_G, ctx.uncertainties_G, strict=True)]


def over_the_mean(ctx):
    with np.errstate(all="ignore"):
        return [a * u / u.sum() for a, u in zip(ctx.advantages_G, ctx.uncertainties_G, strict=True)]


def writes_marks(ctx):
    for mask in ctx.planning_masks_G:
        mask[:] = True
    return spread(ctx)


class Drifting:
    """Its answer depends on the groups that it has seen."""

    def __init__(self):
        self.seen = 0.0

    def __call__(self, ctx):
        self.seen += float(np.sum(ctx.rewards_G))
        return [np.full(len(u), a + self.seen) for a, u in zip(ctx.advantages_G, ctx.uncertainties_G, strict=True)]


def drifting():
    return TransformSpec(name="drifting", compute_context=Drifting())


ASKS_NOBODY = TransformSpec(name="asks_nobody", uses_sepa_controller=True, controller="no_such_controller")
RAISES = TransformSpec(name="raises", post_process=lambda advs_T, planning_T, params: advs_T / len(params["missing"]))


def squared(ctx):
    return np.asarray(ctx.logprobs_T) ** 2


def negative(ctx):
    return np.asarray(ctx.logprobs_T)


def needs_them_secretly(ctx):
    return np.maximum(ctx.entropies_T, 0.0)


NEEDS_THEM = UncertaintySpec(name="needs_them", compute=needs_them_secretly, needs_entropy=True)


def whole(ctx):
    return [np.full(len(u), r) for r, u in zip(ctx.advantages_G, ctx.uncertainties_G, strict=True)]


def forgets_one(ctx):
    return whole(ctx)[1:]


PAIR = AlgorithmSpec(name="pair", advantage_mode="credit_parts.centred", transform_mode="credit_parts.spread")
BROKEN_PAIR = AlgorithmSpec(name="pair", advantage_mode="no_such_advantage", transform_mode="credit_parts.spread")
