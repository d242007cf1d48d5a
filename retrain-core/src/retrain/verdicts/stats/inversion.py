"""Turns a test into the interval that agrees with it: the shifts that it does not reject."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from retrain.kernel.types import Floats

Interval = tuple[float, float]
STEPS = 30  # bisections per limit: to 1e-9 of the range searched
FAR = 1e6  # ranges of the data away from it: there every difference has one sign


def inverted(diffs_N: Floats, *, is_rejected: Callable[[float], bool], is_zero_rejected: bool) -> Interval:
    """Return the interval around the mean of the shifts that a test of 'the mean is `shift`' does not reject.

    It always holds the mean difference, and zero exactly unless `is_zero_rejected`: interval and verdict agree. Limits
    are infinite where even a shift far outside the data is not rejected. Where the shifts that are not rejected have
    gaps, a limit is one of their edges; without a difference it is the whole line.
    """
    if not diffs_N.size:
        return -math.inf, math.inf
    mean = float(diffs_N.mean())
    far = FAR * max(float(np.ptp(diffs_N)), abs(mean), float(np.abs(diffs_N).max()), np.finfo(float).tiny)
    inner = [mean] if is_zero_rejected else [mean, 0.0]
    # Zero, where rejected, bounds the side of the mean on which it lies.
    low, high = (0.0 if is_zero_rejected and (end < 0.0) == (mean > 0.0) else None for end in (-far, far))
    return _limit(min(inner), -far, low, is_rejected), _limit(max(inner), far, high, is_rejected)


def _limit(inside: float, far: float, outside: float | None, is_rejected: Callable[[float], bool]) -> float:
    """Return the edge between `inside`, not rejected, and the first rejected shift towards `far`."""
    if outside is None:
        if not is_rejected(far):
            return math.copysign(math.inf, far)
        outside = _first_rejected(inside, far, is_rejected)
    for _ in range(STEPS):
        middle = (inside + outside) / 2
        inside, outside = (inside, middle) if is_rejected(middle) else (middle, outside)
    return inside


def _first_rejected(inside: float, far: float, is_rejected: Callable[[float], bool]) -> float:
    """Return a rejected shift close to the edge: steps from `inside` towards `far`, each four times the one before."""
    step = (far - inside) / FAR
    while abs(inside + step) < abs(far) and not is_rejected(inside + step):
        step *= 4.0
    return inside + step if abs(inside + step) < abs(far) else far
