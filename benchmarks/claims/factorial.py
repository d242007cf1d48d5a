"""Main effects and interactions of factorial campaigns: false verdicts, coverage, looks, controls, power."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product

import numpy as np

from claims.claim import Claim, Measured, share
from claims.looks import planned
from claims.verdicts import LAWS
from retrain.kernel.seeding import Seeds
from retrain.records.run import Control, control_label
from retrain.records.runs.curves import Direction
from retrain.records.runs.registered import Spend
from retrain.verdicts.stats.flip import FlipTest
from retrain.verdicts.study.comparison import Comparison, Values, Verdict
from retrain.verdicts.study.factorial import Factorial, factorial_of
from retrain.verdicts.study.judge import Pairing, judge, with_values
from retrain.verdicts.study.safeguards import with_controls

ALPHA = 0.05
SHAPES: Sequence[tuple[int, ...]] = ((2, 2), (3, 2), (2, 2, 2))
LOOKS = (8, 12, 16, 20)
NONE_N = np.zeros(0)


def design(shape: Sequence[int]) -> tuple[Factorial, list[str]]:
    """The effects of a factorial of this shape, and its conditions in order."""
    labels = ["".join(map(str, levels)) for levels in product(*map(range, shape))]
    factors = {f"f{place}": {label: label[place] for label in labels} for place in range(len(shape))}
    return factorial_of(factors, labels[0]), labels


def by_label(labels: Sequence[str], values_CN: np.ndarray) -> dict[str, Values]:
    """Values of conditions by label and seed."""
    return {label: dict(enumerate(values_N.tolist())) for label, values_N in zip(labels, values_CN, strict=True)}


def pair(values: Mapping[str, Values], baseline: str, condition: str) -> Pairing:
    """Two conditions or mixtures, as `retrain compare` pairs them."""
    empty = Pairing(baseline=baseline, condition=condition, seeds=(), baseline_N=NONE_N, condition_N=NONE_N)
    return with_values(empty, values[baseline], values[condition])


def judged(factorial: Factorial, values: Mapping[str, Values]) -> tuple[Comparison, ...]:
    """The effects of one campaign."""
    known = factorial.with_mixtures(values)
    pairs = [pair(known, each.baseline, each.condition) for each in factorial.effects]
    return judge(pairs, alpha=ALPHA, direction=Direction.HIGHER)


def _is_found(comparison: Comparison) -> bool:
    return comparison.verdict is not Verdict.CANNOT_TELL


def false_effects(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Conditions of one law, with what seeds have in common: the share of campaigns with any verdict."""
    for shape in SHAPES:
        factorial, labels = design(shape)
        for law, draw in LAWS.items():
            for num_seeds in (8, 12):
                rng = seeds.stream("false effects", len(labels), law, num_seeds)
                found_S = [
                    any(map(_is_found, judged(factorial, by_label(labels, draw(rng, (len(labels), num_seeds))))))
                    for _ in range(simulations)
                ]
                what = f"any false verdict, {' x '.join(map(str, shape))}, {num_seeds} seeds, {law}"
                yield share(what, np.array(found_S), at_most=0.055)


def false_beside_true(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Two by two, with one true effect of 2 sd: verdicts on the two effects that do not exist."""
    factorial, labels = design((2, 2))
    shifts = {"a main effect": (0, 0, 2, 2), "an interaction alone": (1, -1, -1, 1)}
    for what, shift in shifts.items():
        for num_seeds in (8, 12):
            rng = seeds.stream("false beside true", what, num_seeds)
            found_S = []
            for _ in range(simulations):
                values_CN = rng.standard_normal((4, num_seeds)) + np.array(shift, dtype=float)[:, None]
                one, two, both = judged(factorial, by_label(labels, values_CN))
                found_S.append(any(map(_is_found, (two, both) if what == "a main effect" else (one, two))))
            yield share(f"false verdicts beside {what}, {num_seeds} seeds", np.array(found_S), at_most=0.055)


def coverage(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """95 % intervals of a main effect of 1 and an interaction of 1, whatever seeds have in common."""
    for shape in SHAPES:
        factorial, labels = design(shape)
        main, both = factorial.effects[0], next(each for each in factorial.effects if len(each.levels) == 2)
        # Half of an interaction of two levels of each factor is in the main effect of a first level.
        cells = [tuple(map(int, label)) for label in labels]
        shift_C = np.array([float(cell[0] == 1) + float(cell[0] == 1 and cell[1] == 1) for cell in cells])
        true = {main.condition: 1.0 + 1.0 / shape[1], both.condition: 1.0}
        for law in ("normal", "t3", "lognormal"):
            for num_seeds in (6, 8, 12):
                rng = seeds.stream("effects cover", len(labels), law, num_seeds)
                covers: dict[str, list[bool]] = {label: [] for label in true}
                for _ in range(simulations):
                    values_CN = _noise(rng, law, (len(labels), num_seeds)) + rng.normal(0.0, 2.0, num_seeds)
                    known = factorial.with_mixtures(by_label(labels, values_CN + shift_C[:, None]))
                    for each in (main, both):
                        low, high = FlipTest.of(pair(known, each.baseline, each.condition).diffs_N).interval(0.95)
                        covers[each.condition].append(low <= true[each.condition] <= high)
                for kind, found in zip(("main effect", "interaction"), covers.values(), strict=True):
                    what = f"95 % interval covers, {kind}, {' x '.join(map(str, shape))}, {num_seeds} seeds, {law}"
                    yield share(what, np.array(found), at_least=0.94)


def _noise(rng: np.random.Generator, law: str, shape: tuple[int, int]) -> np.ndarray:
    if law == "normal":
        return rng.standard_normal(shape)
    return rng.standard_t(3, shape) if law == "t3" else rng.lognormal(0.0, 1.0, shape)


def planned_looks(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Two by two without any effect, four planned looks: any verdict at any of them."""
    factorial, labels = design((2, 2))
    rng, found_S = seeds.stream("effects at looks"), []
    for _ in range(simulations):
        known = factorial.with_mixtures(by_label(labels, rng.standard_normal((4, LOOKS[-1]))))
        diffs = [pair(known, each.baseline, each.condition).diffs_N for each in factorial.effects]
        tests = [planned(diffs_N, LOOKS, Spend.POCOCK) for diffs_N in diffs]
        found_S.append(any(test.rejected_at(ALPHA / len(diffs)) is not None for test in tests))
    yield share(
        f"any false verdict on effects, looks after {', '.join(map(str, LOOKS))}", np.array(found_S), at_most=0.055
    )


def controls(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """Every condition gains 2 sd over the baseline, and so do their controls: "better" is false."""
    factorial, labels = design((2, 2))
    of = {control_label(label, Control.RANDOM_REWARD): (label, Control.RANDOM_REWARD) for label in labels[1:]}
    rng, found_S = seeds.stream("effects and controls"), []
    for _ in range(simulations):
        values = by_label([*labels, *of], rng.standard_normal((7, 8)) + np.array([0.0, *[2.0] * 6])[:, None])
        known = factorial.with_mixtures(values)
        found = with_controls(
            judged(factorial, values),
            of,
            lambda left, right, known=known: pair(known, left, right),
            alpha=ALPHA,
            direction=Direction.HIGHER,
        )
        found_S.append(any(each.verdict is Verdict.BETTER for each in found))
    yield share("false better, effects that the controls have too, 8 seeds", np.array(found_S), at_most=0.055)


def power(simulations: int, seeds: Seeds) -> Iterator[Measured]:
    """One factor of 1.5 sd, eight seeds: its main effect, and the same condition against the baseline alone."""
    factorial, labels = design((2, 2))
    rng, main_S, alone_S, both_S = seeds.stream("effects found"), [], [], []
    for _ in range(simulations):
        noise_CN = rng.standard_normal((4, 8))
        main_S.append(judged(factorial, by_label(labels, noise_CN + 1.5 * np.array([0, 0, 1, 1])[:, None]))[0])
        both_S.append(judged(factorial, by_label(labels, noise_CN + 1.5 * np.array([0, 0, 0, 1])[:, None]))[2])
        plain = by_label(labels, noise_CN + 1.5 * np.array([0, 0, 1, 1])[:, None])
        others = [pair(plain, labels[0], label) for label in labels[1:]]
        alone_S.append(judge(others, alpha=ALPHA, direction=Direction.HIGHER)[1])
    yield share("main effect of 1.5 sd found, 2 x 2, 8 seeds", np.array(list(map(_is_found, main_S))))
    yield share("the same by pairs with the baseline", np.array(list(map(_is_found, alone_S))))
    yield share("interaction of 1.5 sd found", np.array(list(map(_is_found, both_S))))


CLAIMS: Mapping[str, Claim] = {
    "factorial-false": false_effects,
    "factorial-one-true": false_beside_true,
    "factorial-coverage": coverage,
    "factorial-looks": planned_looks,
    "factorial-controls": controls,
    "factorial-power": power,
}
