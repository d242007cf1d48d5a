"""Coverage of the intervals of variance shares, `retrain compare --variance`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from claims.claim import Claim, Measured, share
from retrain.kernel.seeding import Seeds
from retrain.verdicts.stats.variance import components

NAMES = ("data order", "initialisation", "rest")
SHARES = ((0.0, 0.0, 1.0), (0.3, 0.0, 0.7), (0.4, 0.3, 0.3), (0.8, 0.1, 0.1))
DESIGNS = (((4, 4), 16), ((6, 6), 28))  # seeds of data order x of initialisation, and how many of the runs there are


def variance_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """95 % intervals of the shares cover the true ones, in a balanced and an unbalanced design."""
    for shares in SHARES:
        for sizes, kept in DESIGNS:
            rng = seeds.stream("variance coverage", *map(str, shares), *sizes)
            covers_SP = np.array([_covers(shares, sizes, kept, rng) for _ in range(simulations)])
            for index, name in enumerate(NAMES):
                design = f"{sizes[0]} x {sizes[1]} seeds, {kept} runs"
                what = f"95 % interval covers, {name} {100 * shares[index]:.0f} % of the variance, {design}"
                yield share(what, covers_SP[:, index], at_least=0.94)


def _covers(shares: tuple[float, ...], sizes: tuple[int, int], kept: int, rng: np.random.Generator) -> list[bool]:
    data_N, init_N = (each.ravel() for each in np.indices(sizes))
    effects_N = np.sqrt(shares[0]) * rng.normal(size=sizes[0])[data_N]
    effects_N += np.sqrt(shares[1]) * rng.normal(size=sizes[1])[init_N]
    values_N = effects_N + np.sqrt(shares[2]) * rng.normal(size=data_N.size)
    chosen_K = rng.permutation(data_N.size)[:kept]
    found = components(values_N[chosen_K], {"data order": data_N[chosen_K].tolist(), "init": init_N[chosen_K].tolist()})
    if found is None:
        return [False] * len(NAMES)
    return [p.interval[0] <= true <= p.interval[1] for p, true in zip(found.parts, shares, strict=True)]


CLAIMS: Mapping[str, Claim] = {"variance-coverage": variance_coverage}
