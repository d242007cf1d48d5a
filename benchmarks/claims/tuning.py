"""False verdicts of conditions that are equal but for the luck of their search, and the interval of the best of k.

A configuration x is uniform on its range, and a run at x has the mean -c (x - 1/2)^2 in units of the sd between seeds.
Both conditions try the same configurations, as campaigns do with the random sampler.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from claims.claim import Claim, Measured, share
from claims.verdicts import judged
from retrain.kernel.seeding import Seeds
from retrain.records.runs.curves import Direction
from retrain.records.runs.source import Source
from retrain.records.runs.tuning import ConditionTuning
from retrain.verdicts.stats.best_of import best_intervals, exchange_p, expected_best
from retrain.verdicts.study.comparison import Verdict
from retrain.verdicts.study.tuning import tuning_view

CURVATURES = (0.0, 4.0, 16.0, 64.0)
NUM_SEEDS = (6, 8, 12)
EACH = 4  # configurations of one choice


def equally_tuned(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Each final seed has its own choice (the default): verdicts hold alpha, however much the settings matter."""
    for curvature in CURVATURES:
        for num_seeds in NUM_SEEDS:
            rng = seeds.stream("per seed", str(curvature), num_seeds)
            found_S = [_is_false(_per_seed(rng, curvature, num_seeds)) for _ in range(simulations)]
            what = f"false verdict, {EACH} configurations for each seed, c {curvature:g}, {num_seeds} seeds"
            yield share(what, np.array(found_S), at_most=0.05)


def one_choice(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """One choice for all seeds: the luck of the search is the same in every seed, so verdicts do not allow for it."""
    for curvature in CURVATURES:
        for num_seeds in NUM_SEEDS:
            rng = seeds.stream("best", str(curvature), num_seeds)
            found_S = [_is_false(_one_for_all(rng, curvature, num_seeds)) for _ in range(simulations)]
            what = f'false verdict, choice = "best" of {2 * EACH}, c {curvature:g}, {num_seeds} seeds'
            yield share(what, np.array(found_S))


def one_side_untuned(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """A tuned condition against the same one at a value that nobody tuned: false verdicts, and the warning."""
    tuned = ConditionTuning(
        metric="eval_correct_rate",
        budget="with 24 runs",
        seeds=(7,),
        keys={},
        tried=(({}, 0.5), ({}, 0.6)),
        blocks=("1", "2"),
        chosen={1: {}},
    )
    source = Source(campaign=None, conditions=("0", "1"), candidates=(), plan=None, tuning={"1": tuned})
    view = tuning_view(source, (), Direction.HIGHER, ())
    is_warned = view is not None and view.unequal("0", "1") == "Not tuned alike: 0 not at all; 1 with 24 runs"
    for num_seeds in NUM_SEEDS:
        rng, found = seeds.stream("untuned", num_seeds), []
        for _ in range(simulations):
            values_CN = _per_seed(rng, 16.0, num_seeds)
            values_CN[0] = rng.standard_normal(num_seeds) - 16.0 * (rng.random() - 0.5) ** 2
            found.append(_is_false(values_CN))
        yield share(f"false verdict, one side untuned, c 16, {num_seeds} seeds", np.array(found), at_least=0.2)
    yield share("the verdict says first that one side was not tuned", np.array([is_warned] * 2), at_least=1.0)


def at_equal_budget(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """The verdict at equal budget, by the tuning runs of equal conditions on the same configurations, or on others."""
    for num_tried, size in ((8, 8), (8, 4), (24, 24)):
        for is_same in (True, False):
            for curvature in (0.0, 16.0):
                rng, found = seeds.stream("equal budget", num_tried, size, is_same, str(curvature)), []
                for _ in range(simulations):
                    settings_CN = rng.random((2, num_tried))
                    settings_CN[1] = settings_CN[0] if is_same else settings_CN[1]
                    values_CN = -curvature * (settings_CN - 0.5) ** 2 + rng.standard_normal((2, num_tried))
                    first, second = (dict(enumerate(values_N[:, None])) for values_N in values_CN)
                    found.append(exchange_p(first, second, size)[1] <= 0.05)
                which = "same" if is_same else "other"
                what = f"false at equal budget, best of {size} of {num_tried}, {which} values, c {curvature:g}"
                yield share(what, np.array(found), at_most=0.05)


def learning_at_equal_budget(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """The same of searches that learn, whose configurations depend on each other: each final seed has a search."""
    for num_seeds in NUM_SEEDS:
        for curvature in (16.0, 64.0):
            rng, found = seeds.stream("learning", num_seeds, str(curvature)), []
            for _ in range(simulations):
                sides = [_searched(rng, curvature, num_seeds) for _ in range(2)]
                # By whole searches, as verdicts do, and by single configurations.
                for shape in ((num_seeds, -1), (-1, 1)):
                    first, second = (dict(enumerate(values_NK.reshape(shape))) for values_NK in sides)
                    found.append(exchange_p(first, second, sides[0].size)[1] <= 0.05)
            what = f"of searches that learn, {num_seeds} seeds, c {curvature:g}"
            yield share(f"false at equal budget, {what}", np.array(found[::2]), at_most=0.05)
            yield share(f"if single configurations were exchanged, {what}", np.array(found[1::2]))


def _searched(rng: np.random.Generator, curvature: float, num_seeds: int) -> np.ndarray:
    """Values of a search for each seed: a random setting, then 2 EACH - 1 near the best so far."""
    settings_NK, values_NK = np.empty((num_seeds, 0)), np.empty((num_seeds, 0))
    for number in range(2 * EACH):
        best_N = settings_NK[np.arange(num_seeds), values_NK.argmax(axis=1)] if number else 0.0
        near_N = np.clip(best_N + rng.normal(0.0, 0.05, num_seeds), 0.0, 1.0)
        settings_N = near_N if number else rng.random(num_seeds)
        values_N = -curvature * (settings_N - 0.5) ** 2 + rng.standard_normal(num_seeds)
        settings_NK, values_NK = np.c_[settings_NK, settings_N], np.c_[values_NK, values_N]
    return values_NK


def best_of_intervals(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """How often the interval holds the true expected best of k, of uniform and of normal values."""
    rng = seeds.stream("best of")
    for num_tried in (8, 18, 36):
        for size in (1, 4):
            hits = []
            for _ in range(simulations // 4):
                [(low, high)] = best_intervals(rng.random(num_tried), [size])
                hits.append(low <= size / (size + 1) <= high)  # the mean of the largest of k uniform values
            yield share(f"the interval of the best of {size} holds it, {num_tried} tried", np.array(hits))
    large = expected_best(np.sort(rng.random(100_000)), [1, 4, 16])
    yield Measured(
        what="expected best of 1, 4 and 16 of 100,000 uniform values: largest error",
        figure=float(np.abs(large - np.array([1 / 2, 4 / 5, 16 / 17])).max()),
        error=0.0,
        at_most=0.005,
        is_share=False,
    )


def _per_seed(rng: np.random.Generator, curvature: float, num_seeds: int) -> np.ndarray:
    """Values of two equal conditions by final seed, each at the best of its own share."""
    means_NK = -curvature * (rng.random((num_seeds, EACH)) - 0.5) ** 2
    chosen_CN = (means_NK + rng.standard_normal((2, num_seeds, EACH))).argmax(axis=-1)
    return np.asarray(means_NK[np.arange(num_seeds), chosen_CN] + rng.standard_normal((2, num_seeds)))


def _one_for_all(rng: np.random.Generator, curvature: float, num_seeds: int) -> np.ndarray:
    means_K = -curvature * (rng.random(2 * EACH) - 0.5) ** 2
    chosen_C = (means_K + rng.standard_normal((2, 2 * EACH))).argmax(axis=-1)
    return np.asarray(means_K[chosen_C][:, None] + rng.standard_normal((2, num_seeds)))


def _is_false(values_CN: np.ndarray) -> bool:
    return judged(values_CN)[0].verdict is not Verdict.CANNOT_TELL


CLAIMS: Mapping[str, Claim] = {
    "tuned-alike": equally_tuned,
    "tuned-once": one_choice,
    "untuned": one_side_untuned,
    "equal-budget": at_equal_budget,
    "equal-budget-learning": learning_at_equal_budget,
    "best-of": best_of_intervals,
}
