"""Seeds and held-out examples as crossed random effects: a difference over new seeds, new examples, or both.

All runs of a campaign are scored on the same examples, so a difference over only seeds is about these examples.
`diffs_NE` has a row per seed and a column per example: the rate of the condition minus the baseline's,

    diffs[s, e] = mu + seed_s + example_e + rest_se

If examples share a source (a passage, a template), the column's role is taken by the cluster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.kernel.types import Floats

# Relative to the largest difference: means that differ by less are equal.
_ROUNDING = 1e-13


@dataclass(frozen=True, slots=True, kw_only=True)
class Inference:
    """Interval and two-sided p (of a true mean of zero) by Student's t with `df` degrees of freedom."""

    interval: tuple[float, float]
    p: float
    df: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MeanSquares:
    """Two-way mean squares of n seeds and m clusters: seeds, clusters, and the rest; all at least 0.

    `df_clusters` is m - 1 unless clusters differ in size; `kurtosis` is the excess kurtosis of the cluster means.
    """

    seeds: float
    clusters: float
    rest: float
    num_seeds: int
    num_clusters: int
    df_clusters: float
    kurtosis: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Crossed:
    """The mean difference in each scope; None where it cannot be inferred (one seed, one cluster, or no spread).

    `both` is about new seeds and new examples, `seeds` about new seeds on these examples, `examples` about new examples
    for these runs.
    """

    mean: float
    both: Inference | None
    seeds: Inference | None
    examples: Inference | None
    squares: MeanSquares


def crossed(diffs_NE: Floats, *, level: float = 0.95, clusters_E: Sequence[str] | None = None) -> Crossed:
    """The mean of `diffs_NE` with intervals at `level` in three scopes.

    From the two-way mean squares MS_S, MS_E and MS_R of n seeds and m examples,

        Var(mean)                  = (MS_S + MS_E - MS_R) / (n m)    seeds and examples; Satterthwaite's df, >= n - 1
        Var(mean | these examples) = MS_S / (n m)                    seeds; df n - 1
        Var(mean | these runs)     = MS_E / (n m)                    examples; df m - 1 (Miller, arXiv:2411.00640)

    the first never below the others. It equals the two-way cluster-robust variance of Cameron, Gelbach and Miller
    (2011) but for small-sample factors. With clusters the mean stays that over examples: a cluster counts by its
    share of them, see `_influence_NC`. ValueError for anything but a full matrix of finite numbers.
    """
    diffs_NE = np.asarray(diffs_NE, dtype=np.float64)
    if diffs_NE.ndim != 2 or not diffs_NE.size:
        raise ValueError(f"the differences need a row per seed and a column per example, not {diffs_NE.shape}")
    if not np.isfinite(diffs_NE).all():
        raise ValueError("every seed needs a finite difference for every example")
    values_NC, factor, df_clusters = diffs_NE, 1.0, float(diffs_NE.shape[1] - 1)
    if clusters_E is not None:
        values_NC, factor, df_clusters = _influence_NC(diffs_NE, clusters_E)
    squares = _mean_squares(values_NC, factor, df_clusters)
    n, m = squares.num_seeds, squares.num_clusters
    mean, cells = float(diffs_NE.mean()), float(n * m)
    combined, least_df = squares.seeds + squares.clusters - squares.rest, n - 1.0
    dfs = least_df, df_clusters, least_df * df_clusters
    terms = zip((squares.seeds, squares.clusters, squares.rest), dfs, strict=True)
    spread = sum(square**2 / df for square, df in terms if df > 0.0)
    df = max(combined**2 / spread, least_df) if spread else least_df  # Satterthwaite 1946
    # By chance MS_R may exceed one of the others; new seeds and examples must not look more certain than either.
    variance = max(combined, squares.seeds, squares.clusters)
    return Crossed(
        mean=mean,
        both=_inference(mean, variance / cells, df, level) if n > 1 and m > 1 else None,
        seeds=_inference(mean, squares.seeds / cells, float(n - 1), level),
        examples=_inference(mean, squares.clusters / cells, df_clusters, level),
        squares=squares,
    )


def _mean_squares(values_NC: Floats, factor: float, df_clusters: float) -> MeanSquares:
    """Return mean squares, 0 where they have no degrees of freedom or are of the size of rounding errors."""
    n, m = values_NC.shape
    mean, rows_N, columns_C = values_NC.mean(), values_NC.mean(axis=1), values_NC.mean(axis=0)
    rest_NC = values_NC - rows_N[:, None] - columns_C + mean
    # Below it a sum of squares is one of rounding errors: equal values must not get an interval.
    least = (_ROUNDING * float(np.abs(values_NC).max())) ** 2 * values_NC.size

    def over(total: float, df: int) -> float:
        return total / df if df and total > least else 0.0

    spread, fourth = float(((columns_C - mean) ** 2).mean()), float(((columns_C - mean) ** 4).mean())
    return MeanSquares(
        seeds=over(m * float(((rows_N - mean) ** 2).sum()), n - 1),
        clusters=factor * over(n * float(((columns_C - mean) ** 2).sum()), m - 1),
        rest=factor * over(float((rest_NC**2).sum()), (n - 1) * (m - 1)),
        num_seeds=n,
        num_clusters=m,
        df_clusters=df_clusters,
        kurtosis=fourth / spread**2 - 3.0 if spread > least else 0.0,
    )


def _inference(mean: float, variance: float, df: float, level: float) -> Inference | None:
    if not variance > 0.0:  # nor with one seed or cluster
        return None
    # The same quantiles as scipy.stats.t, a hundred times faster.
    from scipy.special import stdtr, stdtrit

    error = float(np.sqrt(variance))
    half = float(stdtrit(df, 0.5 + level / 2)) * error
    return Inference(interval=(mean - half, mean + half), p=float(2.0 * stdtr(df, -abs(mean) / error)), df=df)


def _influence_NC(diffs_NE: Floats, clusters_E: Sequence[str]) -> tuple[Floats, float, float]:
    """Return a column per cluster, the factor on their mean squares, and the degrees of freedom of their mean.

    A cluster of m_c of the E examples has weight w_c = m_c / E. In row s its column has mu_s + C w_c (mean over its
    examples - mu_s), its influence on mu_s, the mean over examples: the mean over columns is mu_s, row by row.
    Clusters of one size give their plain means. For unequal ones the factor makes the squares unbiased for clusters of
    one variance, and the degrees of freedom belong to sum(w_c^2 r_c^2), about C - 1 for equal ones and 1 when a
    single cluster has nearly all examples (after Bell and McCaffrey 2002).
    """
    names = list(clusters_E)
    if len(names) != diffs_NE.shape[1]:
        raise ValueError(f"{len(names)} clusters for {diffs_NE.shape[1]} examples")
    _, index_E, size_C = np.unique(names, return_inverse=True, return_counts=True)
    sums_NC = np.zeros((len(diffs_NE), size_C.size))
    np.add.at(sums_NC.T, index_E, diffs_NE.T)
    weight_C, mean_N1 = size_C / diffs_NE.shape[1], diffs_NE.mean(axis=1, keepdims=True)
    values_NC = mean_N1 + size_C.size * weight_C * (sums_NC / size_C - mean_N1)
    if (size_C == size_C[0]).all():
        return values_NC, 1.0, float(size_C.size - 1)
    total = float((weight_C**2).sum())
    expected = float((weight_C**2 * (1.0 - 2.0 * weight_C + total)).sum())
    factor = (total / expected) * (size_C.size - 1) / size_C.size
    df = max(1.0, total**2 / float((weight_C**4).sum()) - 1.0)
    return values_NC, factor, df
