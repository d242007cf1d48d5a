"""Tries the parts of a credit flow on synthetic groups before a run loads data or a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import cycle, islice

import numpy as np

from retrain.credit.flow import CreditFlow, uncertainty_name
from retrain.credit.pipeline import CreditGroup, assign_credit, measure_uncertainty, step_advantages
from retrain.kernel.config.resolved import Config
from retrain.kernel.errors import Problem, RetrainError
from retrain.kernel.seeding import Seeds

# Fixed, so that a faulty part fails in the same way in every run.
PROBE_SEED = 0
REWARDS = ((1.0, 0.0, 0.0, 1.0), (0.0, 1.0, 0.0, 0.0))
# Unequal, and one of a single token: parts that assume a rectangle or take a variance fail here.
LENGTHS = ((6, 9, 4, 12), (5, 1, 8, 7))
TEXTS = ("Wait", ",", " 2", "+", "3", " is", " 5", ".", "\n")
# A part may divide by lambda or by 1 - lambda, so both ends are tried.
LAMBDAS = (0.0, 1.0)
WHY = "it was tried on synthetic groups, before data and model load"
FIX = "correct it; `retrain trace` tries the same without a run"


def synthetic_groups(size: int = 4) -> list[CreditGroup]:
    """Two groups of `size` completions with rewards 0 and 1 and everything that a flow may need, seeded.

    Each group of two or more has both rewards.
    """
    stream = Seeds(PROBE_SEED).stream("trace")
    return [
        CreditGroup(
            rewards_G=np.resize(rewards, size),
            logprobs_G=[-stream.exponential(0.6, size=length) for length in lengths],
            planning_G=[stream.random(length) < 0.25 for length in lengths],
            entropies_G=[stream.exponential(0.8, size=length) for length in lengths],
            tokens_G=[np.arange(length) for length in lengths],
            texts_G=[list(islice(cycle(TEXTS), length)) for length in lengths],
            token_rewards_G=[np.linspace(-0.1, 0.1, length) for length in lengths],
            squared_probs_G=[np.linspace(0.2, 0.9, length) for length in lengths],
            greedy=0.5,
            name=f"probe group {number}",
        )
        for number, (rewards, lengths) in enumerate(
            (rewards, np.resize(lengths, size)) for rewards, lengths in zip(REWARDS, LENGTHS, strict=True)
        )
    ]


def try_flow(config: Config, flow: CreditFlow, *, provides_entropy: bool = True) -> list[Problem]:
    """The first fault of the flow on synthetic groups of the run's size, with the key that names the faulty part.

    A part may be made for one range of rewards, so it has to work with one of: 0 and 1, -1 and 1, fractions. It must do
    so for every lambda that its controller may give. The parts may change their state and draw random numbers, so a run
    tries them in a copy of its process.
    """
    groups = [
        # as a step of this run has them: planning marks and entropies only where something makes them
        replace(
            group,
            planning_G=group.planning_G if flow.needs_planning else [np.zeros_like(mask) for mask in group.planning_G],
            entropies_G=group.entropies_G if provides_entropy or flow.needs_entropy else None,
        )
        for group in synthetic_groups(max(2, config.training.group_size))
    ]
    other_ranges = (
        [replace(group, rewards_G=2.0 * group.rewards_G - 1.0) for group in groups],
        [replace(group, rewards_G=np.linspace(0.9, 0.1, len(group.rewards_G))) for group in groups],
    )
    for sepa_lambda in LAMBDAS if flow.controller else LAMBDAS[:1]:
        fault = _fault(config, flow, groups, sepa_lambda)
        if fault and all(_fault(config, flow, some, sepa_lambda) for some in other_ranges):
            return [fault]
    return []


def _fault(config: Config, flow: CreditFlow, groups: Sequence[CreditGroup], sepa_lambda: float) -> Problem | None:
    try:
        assign_credit(groups, flow, sepa_lambda=sepa_lambda)
    except RetrainError as error:
        return replace(error.problems[0], where=_place(config, flow, groups), why=WHY, fix=FIX)
    return None


def _place(config: Config, flow: CreditFlow, groups: Sequence[CreditGroup]) -> str:
    """The key of the first part that fails when tried by itself, in their order; the transform's if none does."""
    algorithm = "algorithm.algorithm_mode" if config.algorithm.algorithm_mode else ""
    place = uncertainty_name(config)[1]
    try:
        for group in groups:
            measure_uncertainty(group, flow)
        place = config.place(algorithm or "algorithm.advantage_mode")
        if not flow.whole:
            step_advantages(groups, flow, [True] * len(groups))
    except RetrainError:
        return place
    return config.place(algorithm or "algorithm.transform_mode")
