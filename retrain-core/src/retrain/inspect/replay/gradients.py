"""Gradients of a step: one of all its rows, and one share of each group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from retrain.kernel.config.resolved import Config
from retrain.kernel.registry import Plugins
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats, TrainBatch

Gradient = NDArray[np.float32]
FOLDED = 2**18  # numbers that are kept of a group's gradient
CHUNK = 2**20


@runtime_checkable
class GivesGradients(Protocol):
    """A backend that computes the gradient of a loss at its present weights and changes nothing."""

    def gradient(
        self, config: Config, plugins: Plugins, batch: TrainBatch, rows: Sequence[int]
    ) -> tuple[Gradient, float, int]:
        """The share of these rows in the gradient of the step's loss, flat; their part of the loss; clipped tokens.

        The loss is that of `config`, and what it divides by is of the whole batch: shares of all rows add up. All rows
        at once are computed as `train` would, bit for bit.
        """


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepGradient:
    """The gradient of a step under one condition: all of it, and each group's share as `Folding` keeps it."""

    whole_N: Gradient
    loss: float
    clipped: int
    shares: Mapping[int, Floats]


class Folding:
    """Keeps of a long vector enough for its inner products with others.

    Up to `FOLDED` numbers are kept as they are. Longer vectors become `FOLDED` sums of entries with random signs in
    random places (a count sketch, Charikar et al. 2002). The inner product of two of them is unbiased, with a standard
    error of at most sqrt(2 / FOLDED) |a||b|, 0.3 %.
    """

    def __init__(self, seeds: Seeds, *, size: int = FOLDED) -> None:
        self._seeds, self._size = seeds, size

    def of(self, vector_N: Gradient) -> Floats:
        """At most `size` numbers."""
        if len(vector_N) <= self._size:
            return vector_N.astype(np.float64)
        folded = np.zeros(self._size)
        for number, begin in enumerate(range(0, len(vector_N), CHUNK)):
            part = vector_N[begin : begin + CHUNK].astype(np.float64)
            places = self._seeds.stream("replay", "fold", number).integers(0, 2 * self._size, len(part))
            signed = np.where(places % 2 == 0, part, -part)
            folded += np.bincount(places // 2, weights=signed, minlength=self._size)
        return folded


def inner(a_N: Gradient, b_N: Gradient) -> float:
    """The inner product in float64, without a copy of either vector in it."""
    parts = range(0, len(a_N), CHUNK)
    return float(sum(np.dot(a_N[i : i + CHUNK].astype(np.float64), b_N[i : i + CHUNK]) for i in parts))


def step_gradient(
    backend: GivesGradients,
    config: Config,
    plugins: Plugins,
    batch: TrainBatch,
    folding: Folding | None,
) -> StepGradient:
    """One pass over all rows and, with `folding`, one over each group's."""
    whole_N, loss, clipped = backend.gradient(config, plugins, batch, range(len(batch.rows)))
    shares: dict[int, Floats] = {}
    if folding:
        groups: dict[int, list[int]] = {}
        for number, row in enumerate(batch.rows):
            groups.setdefault(row.group, []).append(number)
        for group, rows in groups.items():
            shares[group] = folding.of(backend.gradient(config, plugins, batch, rows)[0])
    return StepGradient(whole_N=whole_N, loss=loss, clipped=clipped, shares=shares)
