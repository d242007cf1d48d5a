"""What every solver does with its singular values and factors, whatever computed them."""

from __future__ import annotations

import numpy as np

from retrain.kernel.types import Floats

EPSILON = float(np.finfo(np.float64).eps)


def cleaned(s: Floats, a: Floats, b: Floats) -> Floats:
    """Singular values, one per rank: those that a matrix of this shape cannot have, and pure rounding, are 0."""
    rank = len(a)
    noise = EPSILON * rank * float(np.linalg.norm(a)) * float(np.linalg.norm(b))
    full = np.zeros(rank)
    full[: len(s)] = np.where(s > noise, s, 0.0)
    return full


def padded(a: Floats, b: Floats, rank: int) -> tuple[Floats, Floats]:
    """Factors with zero rows and columns up to `rank`, where the module itself is narrower than that."""
    missing = rank - len(a)
    return np.pad(a, ((0, missing), (0, 0))), np.pad(b, ((0, 0), (0, missing)))
