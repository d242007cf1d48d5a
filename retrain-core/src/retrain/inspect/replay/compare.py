"""How far the gradient of a condition points away from the one taken, and which prompts and tokens turn it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.inspect.replay.gradients import StepGradient, inner
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats

LEVEL = 0.95
ROUNDING = 1e-6  # of 1 - cosine between two float32 gradients
MOST_UNDEFINED = 0.05  # share of resamples without a direction, above which no interval is given


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One gradient beside the one taken.

    `cosine` is None when one of them is 0. `low` and `high` are the middle 95 % over resampled groups, None without
    resamples or where too many had no direction. `parts` add up to 1 - cosine, group by group: positive ones turn it;
    empty where nothing turns beyond rounding.
    """

    cosine: float | None
    low: float | None
    high: float | None
    norm: float
    norm_ratio: float | None
    parts: Mapping[int, float]

    @property
    def turns(self) -> bool:
        """Whether the direction changes by more than float32 rounds."""
        return self.cosine is not None and 1.0 - self.cosine > ROUNDING


def turn_of(taken: StepGradient, other: StepGradient, *, seeds: Seeds, step: int, groups: int, resamples: int) -> Turn:
    """Compare two gradients of a step with `groups` groups, those without gradient included."""
    norm_0, norm = np.sqrt(inner(taken.whole_N, taken.whole_N)), np.sqrt(inner(other.whole_N, other.whole_N))
    cosine = None
    if norm_0 > 0 and norm > 0:
        cosine = float(np.clip(inner(taken.whole_N, other.whole_N) / (norm_0 * norm), -1.0, 1.0))
    low = high = None
    parts: dict[int, float] = {}
    if taken.shares and other.shares and cosine is not None:
        own_PP, cross_PP, other_PP = _products(taken.shares, other.shares, groups)
        low, high = interval(own_PP, cross_PP, other_PP, seeds.stream("replay", step, "groups"), resamples)
        parts = _parts(own_PP, cross_PP, other_PP, float(norm_0), float(norm))
    ratio = float(norm / norm_0) if norm_0 > 0 else None
    turn = Turn(cosine=cosine, low=low, high=high, norm=float(norm), norm_ratio=ratio, parts=parts)
    return turn if turn.turns else replace(turn, parts={})


def interval(
    own_PP: Floats, cross_PP: Floats, other_PP: Floats, stream: np.random.Generator, resamples: int
) -> tuple[float | None, float | None]:
    """The middle 95 % of the cosine over `resamples` draws of as many groups, with replacement.

    Row p, column q of each matrix is the inner product of the shares of groups p and q: of the gradient taken with
    itself, with the other one, and of that with itself. Credit is not assigned again: what a group gets from the others
    (a batch's mean) stays. (None, None) when more than 5 % of the draws have no direction.
    """
    if resamples == 0:
        return None, None
    size = len(own_PP)
    weights_RP = stream.multinomial(size, np.full(size, 1.0 / size), size=resamples).astype(np.float64)
    own_R, cross_R, other_R = (
        np.einsum("rp,pq,rq->r", weights_RP, products_PP, weights_RP, optimize=True)
        for products_PP in (own_PP, cross_PP, other_PP)
    )
    is_defined_R = (own_R > 0) & (other_R > 0)
    if np.mean(~is_defined_R) > MOST_UNDEFINED:
        return None, None
    cosines = np.clip(cross_R[is_defined_R] / np.sqrt(own_R[is_defined_R] * other_R[is_defined_R]), -1.0, 1.0)
    low, high = np.quantile(cosines, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def _products(taken: Mapping[int, Floats], other: Mapping[int, Floats], groups: int) -> tuple[Floats, Floats, Floats]:
    """Inner products of the groups' shares; 0 for a group without one."""

    def products(left: Mapping[int, Floats], right: Mapping[int, Floats]) -> Floats:
        found_PP = np.zeros((groups, groups))
        rows, columns = sorted(left), sorted(right)
        found_PP[np.ix_(rows, columns)] = np.stack([left[p] for p in rows]) @ np.stack([right[q] for q in columns]).T
        return found_PP

    return products(taken, taken), products(taken, other), products(other, other)


def _parts(own_PP: Floats, cross_PP: Floats, other_PP: Floats, norm_0: float, norm: float) -> dict[int, float]:
    """Each group's part of 1 - cosine: <d_p, d> / 2, where d = g/|g| - g0/|g0| and d_p is the group's share of it.

    1 - cosine = |d|^2 / 2, because both are unit vectors.
    """
    of_other_P = other_PP.sum(1) / norm**2 - cross_PP.sum(0) / (norm * norm_0)
    of_taken_P = cross_PP.sum(1) / (norm * norm_0) - own_PP.sum(1) / norm_0**2
    return {group: float(part) for group, part in enumerate((of_other_P - of_taken_P) / 2.0)}


def largest(parts: Mapping[int, float], most: int) -> Sequence[tuple[int, float]]:
    """The groups that turn it most, those that turn it back last."""
    ranked = sorted(parts.items(), key=lambda pair: -pair[1])
    return [(group, part) for group, part in ranked[:most] if part > 0.0]
