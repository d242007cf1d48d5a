"""Components of variance: the share of each source of randomness in the spread of a number, with intervals.

Shapes: N runs, L levels of a factor, R draws.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats

DRAWS = 20_000
REST = "rest"
# Fixed, so that a decomposition is reproducible.
_STREAMS = Seeds(0)
_TINY, _ROUNDING = 1e-9, 1e-12


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """The variance that one source adds, its share of the whole in [0, 1], and the interval of the share.

    `df` are the degrees of freedom of the estimate.
    """

    name: str
    variance: float
    share: float
    interval: tuple[float, float]
    df: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Components:
    """Estimated components, the rest last, and the factors that could not be estimated.

    `constant` never changed, so their share is unknown; `in_rest` had another level in every run and is part of the
    rest; `together` always changed at once, joined by `+` in their row's name; `tangled` cannot be separated from the
    other factors. `total` is the sum of the variances.
    """

    parts: tuple[Component, ...]
    total: float
    level: float
    runs: int
    constant: tuple[str, ...] = ()
    in_rest: tuple[str, ...] = ()
    together: tuple[tuple[str, ...], ...] = ()
    tangled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Square:
    """A sum of squares: sum_i (rest + eigenvalues[i] * component) * chi-square_1, by Henderson's third method."""

    name: str
    sum: float
    eigenvalues: Floats


def components(
    values_N: Floats,
    factors: Mapping[str, Sequence[Hashable]],
    groups: Sequence[Hashable] | None = None,
    *,
    level: float = 0.95,
) -> Components | None:
    """Return variance components of crossed random factors, balanced or not; None without any spread.

    value = mean of its group + sum over factors of an effect of the level + rest, all effects normal and independent. A
    level counts within its group. Each factor's sum of squares is its explanation beyond all other factors (Henderson
    1953, method 3; Searle, Casella, McCulloch, "Variance Components", 1992, ch. 5), so its expectation has no other
    component than its own and the rest. Intervals of the shares are generalised confidence intervals (Weerahandi 1993):
    the quantiles of the shares when every sum of squares is divided by drawn chi-squares. Exact for one factor against
    the rest in a balanced design, otherwise approximate: dependence between sums of squares of an unbalanced design is
    left out. Negative estimates are cut at zero. ValueError when a value is not finite.
    """
    if not np.isfinite(values_N).all():
        raise ValueError("a value is not a finite number")
    groups = groups or [0] * len(values_N)
    fixed = _indicators(groups)
    means = fixed @ (fixed.T @ values_N / fixed.sum(axis=0))
    within_N = values_N - means
    designs, constant, in_rest, together = _designs(factors, groups)
    whole = _basis(np.hstack([fixed, *designs.values()]))
    df = len(values_N) - whole.shape[1]
    squares, tangled = [], []
    for name, design in designs.items():
        others = _basis(np.hstack([fixed, *(each for other, each in designs.items() if other != name)]))
        unexplained = design - others @ (others.T @ design)
        eigenvalues: Floats = np.linalg.eigvalsh(unexplained.T @ unexplained).astype(np.float64)
        # Zeros, up to rounding, belong to directions that the other factors explain.
        eigenvalues = eigenvalues[eigenvalues > _TINY * max(1, len(values_N))]
        if eigenvalues.size:
            explained = float(np.sum((whole.T @ within_N) ** 2) - np.sum((others.T @ within_N) ** 2))
            squares.append(_Square(name=name, sum=max(0.0, explained), eigenvalues=eigenvalues))
        else:
            tangled.append(name)
    rest = max(0.0, float(np.sum(within_N**2) - np.sum((whole.T @ within_N) ** 2))) if df > 0 else 0.0
    if df < 1 or np.abs(within_N).max() <= _ROUNDING * np.abs(values_N).max():
        return None
    parts, total = _parts(squares, rest, df, level)
    found = Components(parts=parts, total=total, level=level, runs=len(values_N), tangled=tuple(tangled))
    return replace(found, constant=constant, in_rest=in_rest, together=together)


def _designs(
    factors: Mapping[str, Sequence[Hashable]], groups: Sequence[Hashable]
) -> tuple[dict[str, Floats], tuple[str, ...], tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return indicator columns of the factors that can be estimated, by name, and those left out, by the reason."""
    by_partition: dict[tuple[int, ...], list[str]] = {}
    constant, in_rest = [], []
    for name, levels in factors.items():
        within = list(zip(groups, levels, strict=True))
        count = len(set(within))
        if count == len(set(groups)):
            constant.append(name)
        elif count == len(within):
            in_rest.append(name)
        else:
            by_partition.setdefault(_partition(within), []).append(name)
    designs = {" + ".join(names): _indicators(partition) for partition, names in by_partition.items()}
    together = tuple(tuple(names) for names in by_partition.values() if len(names) > 1)
    return designs, tuple(constant), tuple(in_rest), together


def _partition(levels: Sequence[Hashable]) -> tuple[int, ...]:
    """Number the levels in order of appearance: equal for two factors that always change together."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(each, len(numbers)) for each in levels)


def _indicators(levels: Sequence[Hashable]) -> Floats:
    """Return [N, L], 1 where the run has the level."""
    numbers = _partition(levels)
    return np.eye(max(numbers) + 1)[list(numbers)]


def _basis(columns: Floats) -> Floats:
    """Return an orthonormal basis of the span of the columns."""
    left, sizes, _ = np.linalg.svd(columns, full_matrices=False)
    return np.asarray(left[:, sizes > _TINY * sizes[0]])


def _parts(squares: Sequence[_Square], rest: float, df: int, level: float) -> tuple[tuple[Component, ...], float]:
    rng = _STREAMS.stream("compare", "variance")
    rest_R = rest / rng.chisquare(df, DRAWS)
    found, drawn_R = [rest / df], [rest_R]
    for each in squares:
        chi_RL = rng.chisquare(1.0, (DRAWS, each.eigenvalues.size))
        # sum = component * (chi . eigenvalues) + rest * chi, solved for the component draw by draw
        drawn_R.append(np.maximum(0.0, each.sum - rest_R * chi_RL.sum(axis=1)) / (chi_RL @ each.eigenvalues))
        found.append(max(0.0, each.sum - each.eigenvalues.size * rest / df) / float(each.eigenvalues.sum()))
    total, total_R = sum(found), np.maximum(np.sum(drawn_R, axis=0), np.finfo(float).tiny)
    tail = (1.0 - level) / 2.0
    names, dfs = [REST, *(each.name for each in squares)], [df, *(each.eigenvalues.size for each in squares)]
    parts = []
    for name, degrees, variance, each_R in zip(names, dfs, found, drawn_R, strict=True):
        low, high = np.quantile(each_R / total_R, [tail, 1.0 - tail])
        share = variance / total if total > 0.0 else 0.0
        limits = float(low), float(high)
        parts.append(Component(name=name, variance=variance, share=share, interval=limits, df=degrees))
    first, *others = parts
    if all(part.interval[0] == 0.0 for part in others):
        # No factor need add anything, so the rest may be all there is.
        first = replace(first, interval=(first.interval[0], 1.0))
    return (*others, first), total
