"""Held-out evaluation: correct rate with a 95 % interval, rewards and unbiased pass@k, on examples never trained on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from retrain.kernel.declared import CORRECT_ABOVE
from retrain.kernel.types import Score
from retrain.observe.metrics.fields import quantiles
from retrain.tasks.scoring.verdict import part_means

# Either side of a 95 % interval.
TAIL = 0.025


def eval_metrics(
    scores: Sequence[Sequence[Score]], correct_above: float = CORRECT_ABOVE, clusters_E: Sequence[str] | None = None
) -> dict[str, float | int]:
    """`eval_*` fields from the scores of each held-out example's completions; no verdict and failures count as wrong.

    `clusters_E` names the source of each example, for the interval; None = all are independent. Mean and quantiles of
    the reward, and the means of its parts, are over the completions that have a score. pass@k = mean over examples of 1
    - C(n - c, k) / C(n, k), with c of n samples correct and k = 1, 2, 4, ... <= n (arXiv:2107.03374).
    """
    samples = len(scores[0])
    values_E = [[score.value for score in example if score.value is not None] for example in scores]
    right_E = np.array([sum(value > correct_above for value in values) for values in values_E])
    rate = float(right_E.mean() / samples)
    low, high = rate_interval(right_E / samples, samples, clusters_E)
    metrics: dict[str, float | int] = {
        "eval_correct_rate": rate,
        "eval_ci_low": low,
        "eval_ci_high": high,
        "eval_examples": len(scores),
        "eval_samples": samples,
    }
    flat = [score for example in scores for score in example]
    if values := [score.value for score in flat if score.value is not None]:
        metrics |= {"eval_mean_reward": math.fsum(values) / len(values), **quantiles("eval_reward", values)}
    metrics |= {f"eval_{name}": mean for name, mean in part_means(flat).items()}
    k = 1
    while k <= samples:
        metrics[f"eval_pass_at_{k}"] = float(np.mean([pass_at_k(samples, int(right), k) for right in right_E]))
        k *= 2
    return metrics


def pass_at_k(samples: int, right: int, k: int) -> float:
    """Unbiased estimate, from `right` of `samples`, of P(at least one of k completions is correct); k <= samples."""
    return 1.0 - math.comb(samples - right, k) / math.comb(samples, k)


def rate_interval(rates_E: np.ndarray, samples: int, clusters_E: Sequence[str] | None = None) -> tuple[float, float]:
    """95 % limits of the mean rate, exact binomial ones (Clopper & Pearson 1934) for the effective number of answers.

    Completions of one example are correlated, so n is not examples x samples but n_eff = p (1 - p) / (variance of the
    mean over examples), clamped to [examples, examples x samples]; without any variance n_eff is the number of
    examples, the conservative end. With x = p n_eff right the limits are quantiles of Beta(x, n_eff - x + 1) and Beta(x
    + 1, n_eff - x). They hold near 0 and 100 %, where normal and Wilson limits cover too rarely; all of 64 right gives
    94.4 to 100 %. If examples share a source, the variance is taken over clusters, and the least n_eff is the number
    of clusters (for unequal ones 1 / sum of their squared shares).
    """
    examples, mean = len(rates_E), float(rates_E.mean())
    spread, least = _spread(rates_E, clusters_E if clusters_E is not None else range(examples))
    effective = mean * (1.0 - mean) / spread if spread > 0.0 else least
    # Correlated answers count less than examples x samples; few examples may show too small a variance by chance.
    n = min(max(effective, least), float(examples * samples))
    right = mean * n
    # The quantile of the beta distribution; importing scipy.stats for it would take over a second.
    from scipy.special import betaincinv

    low = float(betaincinv(right, n - right + 1.0, TAIL)) if right > 0.0 else 0.0
    high = float(betaincinv(right + 1.0, n - right, 1.0 - TAIL)) if right < n else 1.0
    return low, high


def _spread(rates_E: np.ndarray, clusters_E: Sequence[object]) -> tuple[float, float]:
    """Variance of the mean over examples, from the variance between clusters; and the effective number of clusters.

    sum w_c^2 (rate_c - mean)^2 with w_c the cluster's share of the examples, times the factor that makes it unbiased
    for clusters of one variance; 0 with a single cluster. With one example per cluster it is the usual variance of
    a mean.
    """
    numbers: dict[object, int] = {}
    index_E = [numbers.setdefault(each, len(numbers)) for each in clusters_E]
    size_C = np.bincount(index_E)
    weight_C, rate_C = size_C / len(rates_E), np.bincount(index_E, weights=rates_E) / size_C
    total = float((weight_C**2).sum())
    expected = float((weight_C**2 * (1.0 - 2.0 * weight_C + total)).sum())
    found = float((weight_C**2 * (rate_C - rates_E.mean()) ** 2).sum())
    return (total * found / expected if len(size_C) > 1 else 0.0), 1.0 / total
