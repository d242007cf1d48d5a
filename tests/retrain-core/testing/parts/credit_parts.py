"""Advantages, transforms, uncertainties and algorithms: sound ones, and one for each way to be broken."""

from __future__ import annotations

import itertools
import random
from typing import ClassVar

import numpy as np
from variants import variant

from retrain.advantages import (
    AlgorithmSpec,
    Credit,
    GroupStatus,
    Needs,
    TokenCredit,
    TransformOutput,
    TransformSpec,
    UncertaintySpec,
    group_status,
    train_rows,
)
from retrain.api import PluginSpec, Table

CALLS = itertools.count(1)


def centred(rewards):
    return [r - sum(rewards) / len(rewards) for r in rewards]


def sorted_ones(rewards):
    return sorted(centred(rewards))


def over_the_step(step):
    mean = np.concatenate([np.zeros(0), *step.rewards_PG]).mean() if step.rewards_PG else 0.0
    return [rewards_G - mean for rewards_G in step.rewards_PG]


def less_and_less(step):
    return [rewards_G / number for number, rewards_G in enumerate(step.rewards_PG, start=1)]


def one_group_short(step):
    return over_the_step(step)[1:]


def centres_in_place(step):
    for rewards_G in step.rewards_PG:
        rewards_G -= rewards_G.mean() if rewards_G.size else 0.0
    return step.rewards_PG


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
    """Its result depends on the groups that it has seen."""

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


class WholeParams(Table):
    """`[algorithm.params]` of the whole algorithms."""

    decay: float = 0.5


class Whole:
    """Rewards minus a moving average of all rewards so far."""

    needs = Needs()
    labels: ClassVar = {"condition": "running_mean"}

    def __init__(self, context):
        self.decay = context.params.decay
        self.mean = 0.0

    def credit_of(self, completion, score):
        return np.full(completion.num_actions, score.value - self.mean)

    def assign(self, step, groups):
        statuses = tuple(group_status(group) for group in groups)
        tokens = tuple(
            tuple(
                TokenCredit(advantages_A=self.credit_of(c, score))
                for c, score in zip(group.completions, group.scores, strict=True)
            )
            for group in groups
        )
        rows = tuple(
            row
            for status, group, credits_G in zip(statuses, groups, tokens, strict=True)
            if status is GroupStatus.INFORMATIVE
            for completion, credit in zip(group.completions, credits_G, strict=True)
            for row in train_rows(completion, credit.advantages_A)
        )
        return Credit(statuses_P=statuses, tokens_PG=tokens, rows=rows, metrics={"running_mean": self.mean})

    def observe(self, step, groups, credit):
        rewards = [score.value for group in groups for score in group.scores]
        self.mean = self.decay * self.mean + (1 - self.decay) * float(np.mean(rewards))

    def state(self):
        return {"mean": self.mean}

    def restore(self, state):
        self.mean = state["mean"]


class MovesInAssign(Whole):
    def assign(self, step, groups):
        self.mean += 1.0
        return super().assign(step, groups)


class WritesLogprobs(Whole):
    def assign(self, step, groups):
        groups[0].completions[0].logprobs_T[:] = 0.0
        return super().assign(step, groups)


def whole_plugin(factory=Whole, **members):
    made = variant(factory, **members) if members else factory
    return PluginSpec(name="whole", summary="A test.", factory=made, params=WholeParams, traits=Needs())


def assigns(change):
    return whole_plugin(assign=lambda self, step, groups: change(Whole.assign(self, step, groups)))


WHOLE, MOVES_IN_ASSIGN, WRITES_LOGPROBS = map(whole_plugin, (Whole, MovesInAssign, WritesLogprobs))
NO_CONDITION = whole_plugin(labels={"name": "running_mean"})
NUMBER_LABEL = whole_plugin(labels={"condition": "running_mean", "decay": 0.5})
FORGETFUL = whole_plugin(state=lambda self: {}, restore=lambda self, state: None)
NOT_FINITE = whole_plugin(credit_of=lambda self, completion, score: np.full(completion.num_actions, np.inf))
ONE_SHORT = whole_plugin(credit_of=lambda self, completion, score: Whole.credit_of(self, completion, score)[1:])
TRAINS_NOTHING = assigns(lambda credit: Credit(statuses_P=credit.statuses_P, tokens_PG=credit.tokens_PG, rows=()))
RETURNS_ROWS = assigns(lambda credit: credit.rows)
