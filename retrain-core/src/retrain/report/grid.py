"""Resamples curves on a common grid of steps; the mean over the runs of a condition and how well it is known."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from retrain.kernel.types import Floats

FEWEST_SEEDS = 3  # of a point with an interval
ABSENT = 65535  # 16-bit code of a missing number


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Points of `width` consecutive steps each; x counts finished steps, so the evaluation before training is at 0."""

    num_points: int
    width: int

    @property
    def x_P(self) -> Floats:
        """The middle of each point's steps."""
        x_P: Floats = np.arange(self.num_points, dtype=np.float64) * self.width + (self.width + 1) / 2.0
        return x_P

    def binned(self, steps_R: Floats, values_R: Floats) -> Floats:
        """The mean of a run's rows within each point, NaN where there is none."""
        is_there_R = np.isfinite(values_R) & (steps_R >= 0)
        bins_R = (steps_R[is_there_R] // self.width).astype(np.int64)
        is_inside_R = bins_R < self.num_points
        bins_R, values_R = bins_R[is_inside_R], values_R[is_there_R][is_inside_R]
        sums_P = np.bincount(bins_R, weights=values_R, minlength=self.num_points)
        counts_P = np.bincount(bins_R, minlength=self.num_points)
        means_P: Floats = np.divide(sums_P, counts_P, out=np.full(self.num_points, math.nan), where=counts_P > 0)
        return means_P


def grid_for(num_steps: int, most_points: int, *, stride: int = 1) -> Grid:
    """At most `most_points` points for `num_steps` steps of which one in `stride` was read; as fine as allowed.

    Every point covers the same number of steps that were read.
    """
    width = max(1, math.ceil(num_steps / max(1, most_points) / stride)) * stride
    return Grid(num_points=math.ceil(num_steps / width), width=width)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Band:
    """Mean over seeds at each point with its 95 % interval; `num_seeds` is how many have any number."""

    mean_P: Floats
    low_P: Floats
    high_P: Floats
    num_seeds: int


def band_of(curves_S: Sequence[Floats], *, is_share: bool = False) -> Band | None:
    """Mean and Student's 95 % interval over seeds, point by point; None if no seed has a number.

    At points of two seeds, whose interval would dwarf the curve, it goes from one to the other. Shares stay in [0, 1].
    """
    curves_SP = np.array([curve for curve in curves_S if np.isfinite(curve).any()])
    if not curves_SP.size:
        return None
    is_there_SP = np.isfinite(curves_SP)
    counts_P = is_there_SP.sum(axis=0)
    sums_P = np.where(is_there_SP, curves_SP, 0.0).sum(axis=0)
    mean_P = np.divide(sums_P, counts_P, out=np.full(counts_P.size, math.nan), where=counts_P > 0)
    low_P = np.where(is_there_SP, curves_SP, np.inf).min(axis=0)
    high_P = np.where(is_there_SP, curves_SP, -np.inf).max(axis=0)
    low_P[counts_P == 0] = high_P[counts_P == 0] = math.nan
    if (counts_P >= FEWEST_SEEDS).any():
        from scipy.special import stdtrit

        freedom_P = np.maximum(counts_P - 1, 1)
        squares_P = np.where(is_there_SP, (curves_SP - mean_P) ** 2, 0.0).sum(axis=0)
        half_P = stdtrit(freedom_P, 0.975) * np.sqrt(squares_P / freedom_P / np.maximum(counts_P, 1))
        low_P = np.where(counts_P >= FEWEST_SEEDS, mean_P - half_P, low_P)
        high_P = np.where(counts_P >= FEWEST_SEEDS, mean_P + half_P, high_P)
    if is_share:
        low_P, high_P = np.maximum(low_P, 0.0), np.minimum(high_P, 1.0)
    return Band(mean_P=mean_P, low_P=low_P, high_P=high_P, num_seeds=len(curves_SP))


def packed(values_P: Floats) -> dict[str, Any]:
    """Numbers quantised to 16 bits between least and largest, as base64: a third of the size of text.

    The error is at most (largest - least) / 131,068, far below a pixel.
    """
    is_there_P = np.isfinite(values_P)
    if not is_there_P.any():
        return {"lo": 0.0, "hi": 0.0, "b": base64.b64encode(np.full(values_P.size, ABSENT, "<u2").tobytes()).decode()}
    low, high = float(values_P[is_there_P].min()), float(values_P[is_there_P].max())
    shares_P = (values_P - low) / (high - low) if high > low else np.zeros(values_P.size)
    codes_P = np.where(is_there_P, np.rint(np.where(is_there_P, shares_P, 0.0) * (ABSENT - 1)), ABSENT).astype("<u2")
    return {"lo": low, "hi": high, "b": base64.b64encode(codes_P.tobytes()).decode()}
