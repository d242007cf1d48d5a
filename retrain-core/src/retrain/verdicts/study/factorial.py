"""A factorial campaign: main effects and interactions of two factors, as pairs of mixtures of its conditions.

A mixture is a weighted sum of conditions, seed by seed, so a pair of mixtures is judged like a pair of conditions. The
sign-flip test of such a pair permutes within seeds: without a main effect the two levels can be exchanged in a seed,
without an interaction its sign is a fair coin, whatever the main effects. Interactions of three factors or more are not
tested. Effects are sums and differences of the metric itself: an interaction of rates near 0 or 1 may be a ceiling.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

from retrain.records.run import Control, control_label
from retrain.verdicts.study.comparison import Effect, Values

# Sums of decimal rates differ in their last bits; a tie must stay one.
DIGITS = 12
Parts = Mapping[str, float]  # weights of a mixture, by condition


@dataclass(frozen=True, slots=True, kw_only=True)
class Factorial:
    """The effects of a factorial, and the mixtures that they compare by label; both empty for other campaigns."""

    effects: tuple[Effect, ...] = ()
    mixtures: Mapping[str, Parts] = field(default_factory=dict)

    def parts(self, label: str) -> Parts:
        return self.mixtures.get(label, {label: 1.0})

    def with_mixtures(self, values: Mapping[str, Values]) -> dict[str, Values]:
        """Return the values of all conditions and mixtures."""
        return {**values, **{label: mixed(parts, values) for label, parts in self.mixtures.items()}}

    def ended(self, cells: frozenset[tuple[str, int]]) -> set[tuple[str, int]]:
        """Return the mixtures and seeds of which every run is among the `cells` that ended."""
        seeds = {seed for _, seed in cells}
        return {
            (label, seed)
            for label, parts in self.mixtures.items()
            for seed in seeds
            if all((each, seed) in cells for each in parts)
        }


def mixed(parts: Parts, values: Mapping[str, Values]) -> dict[int, float]:
    """Return a mixture by seed, over the seeds that all its conditions have."""
    first, *others = (values.get(label, {}) for label in parts)
    found = {}
    for seed in first:
        if all(seed in each for each in others):
            terms = [weight * each[seed] for weight, each in zip(parts.values(), (first, *others), strict=True)]
            largest = max(map(abs, terms))
            found[seed] = round(math.fsum(terms), DIGITS - math.ceil(math.log10(largest))) if largest else 0.0
    return found


def factorial_of(factors: Mapping[str, Mapping[str, Any]], baseline: str) -> Factorial:
    """Return the effects of factors, given as the level of each condition, against the levels of `baseline`.

    Each other level of a factor has a main effect, averaged over all other factors; each pair of such levels of two
    factors an interaction: both together against the sum of their single effects. Empty unless every combination of the
    levels is one condition.
    """
    names, labels = list(factors), next(iter(factors.values()), {})
    if baseline not in labels or any(each.keys() != labels.keys() for each in factors.values()):
        return Factorial()
    cells = {tuple(level_text(factors[name][label]) for name in names): label for label in labels}
    texts = [list(dict.fromkeys(levels)) for levels in zip(*cells, strict=True)]
    if len(cells) < len(labels) or len(cells) < math.prod(map(len, texts)):
        return Factorial()
    reference = [level_text(factors[name][baseline]) for name in names]

    def mean(levels: Mapping[str, str]) -> dict[str, float]:
        chosen = [label for key, label in cells.items() if levels.items() <= dict(zip(names, key, strict=True)).items()]
        return dict.fromkeys(chosen, 1.0 / len(chosen))

    levels = {
        name: [text for text in each if text != own] for name, each, own in zip(names, texts, reference, strict=True)
    }
    base = dict(zip(names, reference, strict=True))
    effects, mixtures = [], dict[str, Parts]()

    def add(baseline: str, condition: str, chosen: Mapping[str, str], *, sides: tuple[Parts, Parts]) -> None:
        others = tuple(name for name in names if name not in chosen)
        reference = {name: base[name] for name in chosen}
        effects.append(Effect(baseline=baseline, condition=condition, levels=chosen, reference=reference, over=others))
        mixtures.update({baseline: sides[0], condition: sides[1]})
        for control in Control:
            mixtures[control_label(condition, control)] = {control_label(k, control): w for k, w in sides[1].items()}

    for name in names:
        for text in levels[name]:
            sides = mean({name: base[name]}), mean({name: text})
            add(f"{name}={base[name]}", f"{name}={text}", {name: text}, sides=sides)
    for one, two in combinations(names, 2):
        for left, right in product(levels[one], levels[two]):
            single = mean({one: left, two: base[two]}) | mean({one: base[one], two: right})
            added = single | {label: -weight for label, weight in mean({one: base[one], two: base[two]}).items()}
            sides = added, mean({one: left, two: right})
            pair = [f"{one}={left}", f"{two}={right}"]
            add(" + ".join(pair), " × ".join(pair), {one: left, two: right}, sides=sides)
    return Factorial(effects=tuple(effects), mixtures=mixtures)


def level_text(level: Any) -> str:
    return level if isinstance(level, str) else json.dumps(level, default=str)
