"""A figure that a simulation measured, held against the target of the claim it belongs to.

A claim is a function of the number of simulations and of the seeds that yields such figures; a module of this folder
lists its own in `CLAIMS`, by the name that `--only` takes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from retrain.kernel.seeding import Seeds

Claim = Callable[[int, Seeds], Iterator["Measured"]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """One line of the table: `error` is two standard errors of the figure; without a bound it is only reported."""

    what: str
    figure: float
    error: float
    at_least: float | None = None
    at_most: float | None = None
    is_share: bool = True

    @property
    def is_met(self) -> bool:
        """Whether the figure is within two standard errors of its target; NaN never is."""
        if math.isnan(self.figure):
            return False
        is_low = self.at_least is not None and self.figure < self.at_least - self.error
        is_high = self.at_most is not None and self.figure > self.at_most + self.error
        return not (is_low or is_high)

    @property
    def target(self) -> str:
        """The target in words."""
        if self.at_least is not None and self.at_most is not None:
            return f"{self.shown(self.at_least)} to {self.shown(self.at_most)}"
        if self.at_least is not None:
            return f"at least {self.shown(self.at_least)}"
        return f"at most {self.shown(self.at_most)}" if self.at_most is not None else "reported"

    def shown(self, value: float) -> str:
        """A value as the table shows it: shares in percent."""
        return f"{100 * value:.2f} %" if self.is_share else f"{value:.4g}"


def share(what: str, hits_S: np.ndarray, *, at_least: float | None = None, at_most: float | None = None) -> Measured:
    """The share of simulations in which something happened, one flag each."""
    rate = float(np.mean(hits_S))
    error = 2.0 * math.sqrt(rate * (1.0 - rate) / len(hits_S))
    return Measured(what=what, figure=rate, error=error, at_least=at_least, at_most=at_most)


def mean(what: str, values_S: np.ndarray, *, at_least: float | None = None, at_most: float | None = None) -> Measured:
    """The mean of a number over simulations."""
    error = 2.0 * float(np.std(values_S, ddof=1)) / math.sqrt(len(values_S))
    figure = float(np.mean(values_S))
    return Measured(what=what, figure=figure, error=error, at_least=at_least, at_most=at_most, is_share=False)
