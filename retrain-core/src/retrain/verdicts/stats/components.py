"""Variance components of seeds and examples, and the numbers of either that would suffice, with their uncertainty.

The expected mean squares of n seeds and m clusters are MS_S = rest + m seed, MS_E = rest + n cluster, MS_R = rest. A
figure that depends on them has the interval of its values at drawn components: every mean square is replaced by df MS /
chi2_df (generalised inference, Weerahandi 1993; Tsui and Weerahandi 1989). Held-out examples are far from normal: their
df is the one that gives MS_E the variance of its kurtosis (after Bonett 2006).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats
from retrain.verdicts.stats.crossed import MeanSquares

DRAWS = 400
POWER = 0.8
# No study has more seeds or clusters: such a number is reported as out of reach.
MOST = 10_000
ADVICE_LEVEL = 0.8
# Fixed, so that a comparison is reproducible.
_STREAMS = Seeds(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A standard deviation, its interval, and its share of the variance of the mean."""

    sd: float
    interval: tuple[float, float]
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Standard deviations of a difference: of a seed over all examples, of a cluster over all seeds, of the rest.

    The rest is their interaction, and the noise of few samples.
    """

    seed: Part
    cluster: Part
    rest: Part


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreseen:
    """Half the width of an interval yet to be measured, with the interval of that forecast."""

    half_width: float
    interval: tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Needed:
    """The number that finds a difference in 80 % of studies; None if no number up to `MOST` does."""

    number: int | None
    interval: tuple[int | None, int | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Draws:
    """Variance components, the estimate first and then `DRAWS` drawn ones: (1 + DRAWS,) each, at least 0."""

    seed_D: Floats
    cluster_D: Floats
    rest_D: Floats
    num_seeds: int
    num_clusters: int


def draw_components(squares: MeanSquares) -> Draws:
    """Return the components and their draws; ValueError unless there are two seeds and two clusters."""
    n, m = squares.num_seeds, squares.num_clusters
    if n < 2 or m < 2:
        raise ValueError(f"variance components need two seeds and two clusters, not {n} and {m}")
    stream = _STREAMS.stream("compare", "components")
    # (2 / df + kurtosis / m) is the squared coefficient of variation of MS_E; a chi-square with this df has the same.
    df_clusters = 2.0 / (2.0 / squares.df_clusters + max(squares.kurtosis, 0.0) / m)
    dfs = n - 1.0, df_clusters, (n - 1.0) * squares.df_clusters
    seeds_D, clusters_D, rest_D = (
        np.concatenate([[square], df * square / stream.chisquare(df, DRAWS)])
        for square, df in zip((squares.seeds, squares.clusters, squares.rest), dfs, strict=True)
    )
    return Draws(
        seed_D=np.maximum(seeds_D - rest_D, 0.0) / m,
        cluster_D=np.maximum(clusters_D - rest_D, 0.0) / n,
        rest_D=rest_D,
        num_seeds=n,
        num_clusters=m,
    )


def components(draws: Draws, *, level: float = 0.95) -> Components:
    n, m = draws.num_seeds, draws.num_clusters
    variances = {"seed": (draws.seed_D, n), "cluster": (draws.cluster_D, m), "rest": (draws.rest_D, n * m)}
    total = sum(float(variance_D[0]) / count for variance_D, count in variances.values())
    parts = {}
    for name, (variance_D, count) in variances.items():
        sd_D, share = np.sqrt(variance_D), float(variance_D[0]) / count / total if total else 0.0
        parts[name] = Part(sd=float(sd_D[0]), interval=_interval(sd_D, level), share=share)
    return Components(**parts)


def half_widths(
    draws: Draws, *, seeds: int | Floats, clusters: int | Floats, level: float, power: float = 0.5
) -> Floats:
    """Return half-widths of the crossed interval at `level` for other numbers of seeds and clusters: (1 + D,).

    With `power` above a half, the difference that such an interval keeps off zero in that share of studies. Student's
    quantile is the expansion of Cornish and Fisher in 1 / df, good to 1 % from 5 df on at a level of 95 %.
    """
    from scipy.special import ndtri

    n, m = np.asarray(seeds, np.float64), np.asarray(clusters, np.float64)
    of_rest_D = draws.rest_D
    of_seeds_D, of_clusters_D = of_rest_D + m * draws.seed_D, of_rest_D + n * draws.cluster_D
    combined_D = of_seeds_D + of_clusters_D - of_rest_D
    dfs = n - 1.0, m - 1.0, (n - 1.0) * (m - 1.0)
    spread_D = of_seeds_D**2 / dfs[0] + of_clusters_D**2 / dfs[1] + of_rest_D**2 / dfs[2]
    # Satterthwaite's df, with the bounds of `crossed`
    df_D = np.maximum(combined_D**2 / np.where(spread_D > 0.0, spread_D, 1.0), n - 1.0)
    z = float(ndtri(0.5 + level / 2.0))
    first, second = (z**3 + z) / 4.0, (5.0 * z**5 + 16.0 * z**3 + 3.0 * z) / 96.0
    student_D = z + first / df_D + second / df_D**2
    return np.asarray((student_D + float(ndtri(power))) * np.sqrt(combined_D / (n * m)))


def foreseen(draws: Draws, *, seeds: int, clusters: int, level: float) -> Foreseen:
    half_D = half_widths(draws, seeds=seeds, clusters=clusters, level=level)
    return Foreseen(half_width=float(half_D[0]), interval=_interval(half_D, ADVICE_LEVEL))


def numbers_needed(draws: Draws, differences_D: Floats, *, of_seeds: bool, level: float) -> Floats:
    """Return the fewest seeds (or clusters) that find the difference in 80 % of studies, per draw.

    Found means that the interval at `level` leaves out zero. Never fewer than there are; infinite where `MOST` do not
    suffice.
    """

    def found_D(number_D: Floats) -> Floats:
        seeds, clusters = (number_D, draws.num_clusters) if of_seeds else (draws.num_seeds, number_D)
        return half_widths(draws, seeds=seeds, clusters=clusters, level=level, power=POWER)

    now = float(draws.num_seeds if of_seeds else draws.num_clusters)
    low_D, high_D = np.full(differences_D.size, now), np.full(differences_D.size, float(max(MOST, now)))
    is_enough_D, is_never_D = found_D(low_D) <= differences_D, found_D(high_D) > differences_D
    # Bisection of all draws at once; half-widths shrink with the number, so each draw has one edge.
    while (high_D - low_D > 1.0).any():
        middle_D = np.floor((low_D + high_D) / 2.0)
        is_wide_D = found_D(middle_D) > differences_D
        low_D, high_D = np.where(is_wide_D, middle_D, low_D), np.where(is_wide_D, high_D, middle_D)
    return np.where(is_enough_D, now, np.where(is_never_D, np.inf, high_D))


def needed(numbers_D: Floats) -> Needed:
    # Order statistics in place of quantiles: between infinite numbers nothing can be interpolated.
    ordered_D = np.sort(numbers_D[1:])
    margin = int((1.0 - ADVICE_LEVEL) / 2.0 * ordered_D.size)
    number, low, high = (
        int(each) if np.isfinite(each) else None for each in (numbers_D[0], ordered_D[margin], ordered_D[-1 - margin])
    )
    return Needed(number=number, interval=(low, high))


def true_differences(draws: Draws, difference: float) -> Floats:
    """Return the size of the observed difference, and draws of the true one.

    They are normal around the observed one with the drawn variance of the mean over both.
    """
    n, m = draws.num_seeds, draws.num_clusters
    variance_D = draws.seed_D / n + draws.cluster_D / m + draws.rest_D / (n * m)
    noise_D = _STREAMS.stream("compare", "true difference").standard_normal(variance_D.size)
    # The first draw is the estimate, the observed difference itself.
    noise_D[0] = 0.0
    return np.asarray(np.abs(difference + noise_D * np.sqrt(variance_D)))


def _interval(values_D: Floats, level: float) -> tuple[float, float]:
    """Return quantiles of the draws, widened where the estimate itself lies outside them."""
    low, high = (float(q) for q in np.quantile(values_D[1:], [(1.0 - level) / 2.0, (1.0 + level) / 2.0]))
    return min(low, float(values_D[0])), max(high, float(values_D[0]))


# Share of the draws in which a way must be the cheaper one to be called so.
SURE = 0.8
# An interval of a number needed is of no use beyond this factor between its ends: "8 to 200 seeds" advises nothing.
CLEAR = 4


class Way(StrEnum):
    SEEDS = "seeds"
    EXAMPLES = "examples"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Measured seconds: of one more seed (a run of either condition), and of one more example (in every run)."""

    seed_s: float
    example_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Advice on narrowing the interval for examples like these; the intervals of the advice are 80 % ones.

    `half_width` is half of today's interval, infinite where few seeds leave it without a limit; `twice_seeds` and
    `twice_examples` are the same after doubling either. `seeds` and `examples` are how many in all would make it leave
    out zero in 80 % of studies, the others unchanged, if the true difference is the observed one; their intervals allow
    for its uncertainty. `cheaper` is the cheaper of the two in measured seconds, None without a cost or unless one way
    is in 80 % of the draws; `chance` is the share of draws for `examples`.
    """

    half_width: float
    twice_seeds: Foreseen
    twice_examples: Foreseen
    seeds: Needed
    examples: Needed
    cost: Cost | None
    cheaper: Way | None
    chance: float | None

    def is_clear(self, way: Way) -> bool:
        """True if the number needed is known well enough to be of use: both ends of its interval within a factor."""
        low, high = (self.seeds if way is Way.SEEDS else self.examples).interval
        return low is not None and high is not None and high <= CLEAR * low


def advise(
    draws: Draws,
    *,
    difference: float,
    half_width: float,
    level: float,
    num_examples: int,
    least_seeds: int,
    cost: Cost | None,
) -> Advice:
    """Return the advice from the drawn variance components, the observed difference and today's half-width.

    With fewer than `least_seeds` no number of examples gives a verdict, since the test over seeds cannot.
    """
    size = num_examples / draws.num_clusters  # examples in a cluster
    differences_D = true_differences(draws, difference)
    seeds_D = np.maximum(numbers_needed(draws, differences_D, of_seeds=True, level=level), least_seeds)
    examples_D = np.ceil(size * numbers_needed(draws, differences_D, of_seeds=False, level=level))
    if draws.num_seeds < least_seeds:
        examples_D = np.full_like(examples_D, np.inf)
    n, m = draws.num_seeds, draws.num_clusters
    cheaper, chance = _cheaper(seeds_D - n, examples_D - num_examples, cost)
    return Advice(
        half_width=half_width,
        twice_seeds=foreseen(draws, seeds=2 * n, clusters=m, level=level),
        twice_examples=foreseen(draws, seeds=n, clusters=2 * m, level=level),
        seeds=needed(seeds_D),
        examples=needed(examples_D),
        cost=cost,
        cheaper=cheaper,
        chance=chance,
    )


def _cheaper(seeds_D: Floats, examples_D: Floats, cost: Cost | None) -> tuple[Way | None, float | None]:
    """Return the way that costs less in most draws, and the share of draws for `examples`.

    Draws that need nothing do not count.
    """
    if cost is None:
        return None, None
    seeds_D, examples_D = seeds_D * cost.seed_s, examples_D * cost.example_s
    is_open_D = (np.minimum(seeds_D, examples_D) < np.inf) & (np.maximum(seeds_D, examples_D) > 0.0)
    if not is_open_D.any():
        return None, None
    chance = float((examples_D < seeds_D)[is_open_D].mean())
    return (Way.EXAMPLES if chance >= SURE else Way.SEEDS if chance <= 1.0 - SURE else None), chance
