"""Coverage of intervals over seeds and examples, and how far the advice on more of either can be trusted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from claims.claim import Claim, Measured, share
from retrain.kernel.seeding import Seeds
from retrain.verdicts.stats.components import (
    CLEAR,
    MOST,
    Draws,
    components,
    draw_components,
    foreseen,
    needed,
    numbers_needed,
    true_differences,
)
from retrain.verdicts.stats.crossed import crossed

SEEDS, SAMPLES = 8, 4  # seeds of each study, samples of an example
DIFFICULTY, SEED_SD = 1.5, 0.2  # standard deviations of examples and of runs, in logits
SIZES = (64, 256)
INTERACTIONS = (0.0, 0.5, 1.0)
CLUSTERS = {"equal": (4,) * 16, "unequal": (1, 1, 1, 2, 2, 3, 4, 6, 12) * 2}
INTEGRATED = (100, 40_000)  # runs and examples over which the truth is computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """Two conditions whose logits differ by example, by condition and example (`interaction`) and by run.

    The second has `effect` logits more.
    """

    interaction: float
    effect: float = 0.0

    def diffs_NE(
        self, rng: np.random.Generator, num_seeds: int, examples: int, index_E: np.ndarray | None = None
    ) -> np.ndarray:
        """Observed differences; examples of one index, where given, have everything but the samples in common."""
        observed = rng.binomial(SAMPLES, self._rates_2NE(rng, num_seeds, examples, index_E)) / SAMPLES
        return np.asarray(observed[1] - observed[0])

    def truth(self, rng: np.random.Generator) -> tuple[float, float, float]:
        """The mean difference over all seeds and examples, and the standard deviations of a seed and of an example."""
        rates_2NE = self._rates_2NE(rng, *INTEGRATED, None)
        diffs_NE = rates_2NE[1] - rates_2NE[0]
        mean = float(diffs_NE.mean()) if self.effect else 0.0
        return mean, float(diffs_NE.mean(axis=1).std()), float(diffs_NE.mean(axis=0).std())

    def _rates_2NE(
        self, rng: np.random.Generator, num_seeds: int, examples: int, index_E: np.ndarray | None
    ) -> np.ndarray:
        count = examples if index_E is None else int(index_E.max()) + 1
        logits_2C = rng.normal(0.0, DIFFICULTY, count) + rng.normal(0.0, self.interaction, (2, count))
        logits_2E = logits_2C if index_E is None else logits_2C[:, index_E]
        runs_2N = rng.normal(0.0, SEED_SD, (2, num_seeds)) + np.array([[0.0], [self.effect]])
        return np.asarray(1.0 / (1.0 + np.exp(-(logits_2E[:, None, :] + runs_2N[:, :, None]))))


def crossed_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """95 % intervals on examples like these cover the difference over all examples; those over seeds alone do not."""
    for examples in SIZES:
        for interaction in INTERACTIONS:
            for effect in (0.0, 0.5):
                law = Law(interaction=interaction, effect=effect)
                rng = seeds.stream("crossed coverage", examples, f"{interaction} {effect}")
                true = law.truth(rng)[0]
                covers_S2 = np.array([_covers(law.diffs_NE(rng, SEEDS, examples), true) for _ in range(simulations)])
                what = f"{SEEDS} x {examples}, interaction {interaction:g}, effect {effect:g} logits"
                yield share(f"95 % interval on examples like these covers, {what}", covers_S2[:, 0], at_least=0.93)
                yield share(f"the one over seeds alone covers, {what}", covers_S2[:, 1])


def clustered_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """New clusters are covered, whether they have one size or not; taken for single examples they are not."""
    law = Law(interaction=1.0)
    for name, sizes in CLUSTERS.items():
        rng, index_E = seeds.stream("clustered coverage", name), np.repeat(np.arange(len(sizes)), sizes)
        covers = []
        for _ in range(simulations):
            diffs_NE = law.diffs_NE(rng, SEEDS, index_E.size, index_E)
            clustered = _covers(diffs_NE, 0.0, [str(index) for index in index_E])
            covers.append((clustered[0], _covers(diffs_NE, 0.0)[0]))
        covers_S2, what = np.array(covers), f"{len(sizes)} clusters of {name} sizes, {index_E.size} examples"
        yield share(f"95 % interval on examples like these covers, {what}", covers_S2[:, 0], at_least=0.93)
        yield share(f"the one without clusters covers, {what}", covers_S2[:, 1])


def component_coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """95 % intervals of the standard deviations of a seed and of an example."""
    for examples in SIZES:
        for interaction in INTERACTIONS[1:]:
            law, rng = Law(interaction=interaction), seeds.stream("component coverage", examples, f"{interaction}")
            _, seed_sd, example_sd = law.truth(rng)
            covers = []
            for _ in range(simulations):
                found = components(draw_components(crossed(law.diffs_NE(rng, SEEDS, examples)).squares))
                pairs = ((found.seed.interval, seed_sd), (found.cluster.interval, example_sd))
                covers.append([low <= sd <= high for (low, high), sd in pairs])
            covers_S2, what = np.array(covers), f"{SEEDS} x {examples}, interaction {interaction:g} logits"
            yield share(f"95 % interval of the sd of a seed covers, {what}", covers_S2[:, 0])
            yield share(f"95 % interval of the sd of an example covers, {what}", covers_S2[:, 1])


def advice(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """The 80 % intervals of the advice hold what is truly needed, and are seldom narrow enough to be said."""
    law, rng = Law(interaction=0.5, effect=0.3), seeds.stream("advice")
    truth = _true_draws(law, rng)
    twice = foreseen(truth, seeds=SEEDS, clusters=128, level=0.95).half_width
    true_D = np.full(2, law.truth(rng)[0])
    numbers = [float(numbers_needed(truth, true_D, of_seeds=way, level=0.95)[0]) for way in (True, False)]
    covers, is_clear = [], []
    for _ in range(simulations):
        result = crossed(law.diffs_NE(rng, SEEDS, 64))
        draws = draw_components(result.squares)
        low, high = foreseen(draws, seeds=SEEDS, clusters=128, level=0.95).interval
        row = [low <= twice <= high]
        for way, number in zip((True, False), numbers, strict=True):
            found = needed(numbers_needed(draws, true_differences(draws, result.mean), of_seeds=way, level=0.95))
            least, most = (np.inf if end is None else float(end) for end in found.interval)
            row.append(least <= number <= most)
            is_clear.append(most <= CLEAR * least < np.inf)
        covers.append(row)
    covers_S3 = np.array(covers)
    yield share("80 % interval of the half-width with twice the examples covers", covers_S3[:, 0])
    for column, name in ((1, "seeds"), (2, "examples")):
        number = numbers[column - 1]
        truly = f"{number:.0f}" if number < np.inf else f"more than {MOST:,}"
        yield share(f"80 % interval of the {name} needed covers, truly {truly}", covers_S3[:, column])
    yield share("numbers needed known well enough to be said", np.array(is_clear))


def _covers(diffs_NE: np.ndarray, true: float, names: Sequence[str] | None = None) -> tuple[bool, bool]:
    """Whether the interval on examples like these and that over seeds alone hold the true difference."""
    result = crossed(diffs_NE, clusters_E=names)
    found = [each.interval if each else (true, true) for each in (result.both, result.seeds)]
    return found[0][0] <= true <= found[0][1], found[1][0] <= true <= found[1][1]


def _true_draws(law: Law, rng: np.random.Generator) -> Draws:
    """The true components of a study of 64 examples, the rest as the mean of many studies."""
    _, seed_sd, example_sd = law.truth(rng)
    rest = np.mean([crossed(law.diffs_NE(rng, SEEDS, 64)).squares.rest for _ in range(500)])
    parts = {"seed_D": seed_sd**2, "cluster_D": example_sd**2, "rest_D": float(rest)}
    arrays = {name: np.full(2, part) for name, part in parts.items()}
    return Draws(**arrays, num_seeds=SEEDS, num_clusters=64)


CLAIMS: Mapping[str, Claim] = {
    "crossed-coverage": crossed_coverage,
    "clustered-coverage": clustered_coverage,
    "component-coverage": component_coverage,
    "advice": advice,
}
