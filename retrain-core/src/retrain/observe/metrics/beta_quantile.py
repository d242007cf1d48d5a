"""Quantiles of the beta distribution without scipy, whose import would cost a run more than all its evaluations."""

from __future__ import annotations

import math

_TINY = 1e-300  # in place of a zero in a denominator
_PRECISION = 1e-15
_BISECTIONS = 60


def beta_quantile(a: float, b: float, chance: float) -> float:
    """The x in [0, 1] below which a Beta(a, b) variable lies with this chance; a and b positive."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if beta_cdf(a, b, middle) < chance else (low, middle)
    return (low + high) / 2


def beta_cdf(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b): x^a (1 - x)^b / (a B(a, b)) times a continued fraction.

    The fraction is evaluated after Lentz (Press et al., Numerical Recipes, 6.4), on the side of the mean on which it
    converges in about sqrt(max(a, b)) terms.
    """
    if x <= 0.0 or x >= 1.0:
        return 0.0 if x <= 0.0 else 1.0
    log_front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    if x <= (a + 1.0) / (a + b + 2.0):
        return math.exp(log_front) * _fraction(a, b, x) / a
    return 1.0 - math.exp(log_front) * _fraction(b, a, 1.0 - x) / b


def _fraction(a: float, b: float, x: float) -> float:
    upper, lower = 1.0, 1.0 / ((1.0 - (a + b) * x / (a + 1.0)) or _TINY)
    value = lower
    for m in range(1, round(100 + 10 * math.sqrt(max(a, b)))):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            lower = 1.0 / ((1.0 + numerator * lower) or _TINY)
            upper = (1.0 + numerator / upper) or _TINY
            value *= upper * lower
        if abs(upper * lower - 1.0) < _PRECISION:
            break
    return value
