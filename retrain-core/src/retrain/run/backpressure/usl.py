"""Fits the Universal Scalability Law to measured throughput."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MIN_DISTINCT = 3  # three parameters: fewer different p do not determine the curve
UNBOUNDED = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """X(p) = rate p / (1 + sigma (p - 1) + kappa p (p - 1)), in tokens per second at p concurrent completions.

    `rate` > 0 is the throughput of a single completion, `sigma` >= 0 the share of work that queues for a resource
    (contention), `kappa` >= 0 the cost of coordinating every pair (coherency; Gunther, Guerrilla Capacity Planning,
    2007).
    """

    sigma: float
    kappa: float
    rate: float

    def throughput(self, p: float) -> float:
        """X(p), for p >= 1."""
        return self.rate * p / (1.0 + self.sigma * (p - 1.0) + self.kappa * p * (p - 1.0))

    @property
    def p_star(self) -> float:
        """The p of the highest throughput, sqrt((1 - sigma) / kappa), at least 1.

        1 when sigma >= 1: a second completion gains nothing. `UNBOUNDED` when kappa is 0: throughput never falls.
        """
        if self.sigma >= 1.0:
            return 1.0
        if self.kappa <= 0.0:
            return UNBOUNDED
        return max(1.0, math.sqrt((1.0 - self.sigma) / self.kappa))


def fit_usl(samples: Sequence[tuple[float, float]], *, relative: bool = False) -> Scaling | None:
    """Least squares on p / X = (1 + sigma (p - 1) + kappa p (p - 1)) / rate over samples (p >= 1, X > 0).

    `relative` weights each sample with X / p, so that errors count as fractions of the throughput: the plain form
    trusts slow samples more than fast ones. p is scaled by its largest value, so the result does not depend on units. A
    negative sigma or kappa (faster than linear) becomes 0. None with fewer than `MIN_DISTINCT` different p, with a
    non-finite number, or when the best curve has no positive rate: there is then no basis for a decision.
    """
    if len({p for p, _ in samples}) < MIN_DISTINCT:
        return None
    p_N, x_N = np.asarray(samples, dtype=np.float64).T
    if not (np.isfinite(p_N).all() and np.isfinite(x_N).all() and p_N.min() >= 1.0 and x_N.min() > 0.0):
        return None
    top = p_N.max()
    terms_N3 = np.stack([np.ones_like(p_N), (p_N - 1.0) / top, p_N * (p_N - 1.0) / top**2], axis=1)
    costs_N = p_N / x_N
    weights_N = 1.0 / costs_N if relative else np.full_like(costs_N, 1.0 / costs_N.max())
    solution = np.linalg.lstsq(terms_N3 * weights_N[:, None], costs_N * weights_N, rcond=None)[0]
    inverse_rate, queueing, crosstalk = (float(value) for value in solution)
    if not inverse_rate > 0.0:
        return None
    sigma, kappa = queueing / top / inverse_rate, crosstalk / top**2 / inverse_rate
    if not all(map(math.isfinite, (sigma, kappa, 1.0 / inverse_rate))):
        return None
    return Scaling(sigma=max(sigma, 0.0), kappa=max(kappa, 0.0), rate=1.0 / inverse_rate)
