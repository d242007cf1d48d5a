"""Components of variance: against the textbook's balanced formulas, by coverage, and what cannot be told apart."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.verdicts.stats.variance import REST, components


def crossed(sds: tuple[float, float, float], sizes: tuple[int, int], seed: int) -> tuple[np.ndarray, dict]:
    """A value per cell of data x initialisation, whose effects have these standard deviations; the last is the rest."""
    rng = np.random.default_rng(seed)
    data, init = (each.ravel() for each in np.indices(sizes))
    values = sds[0] * rng.normal(size=sizes[0])[data] + sds[1] * rng.normal(size=sizes[1])[init]
    return values + sds[2] * rng.normal(size=data.size), {"data": data.tolist(), "init": init.tolist()}


def test_balanced_estimates_are_those_of_the_analysis_of_variance() -> None:
    values, factors = crossed((1.0, 0.5, 0.7), (5, 4), 3)
    found = components(values, factors)
    assert found is not None
    table = values.reshape(5, 4)
    rows, columns, mean = table.mean(axis=1), table.mean(axis=0), table.mean()
    rest = ((table - rows[:, None] - columns + mean) ** 2).sum() / 12
    expected = {"data": rows.var(ddof=1) - rest / 4, "init": columns.var(ddof=1) - rest / 5, REST: rest}
    assert {part.name: part.variance for part in found.parts} == pytest.approx(expected)
    assert [part.df for part in found.parts] == [4, 3, 12]
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)


def test_the_interval_of_one_factor_is_the_exact_one_of_the_textbook() -> None:
    """Searle, Casella, McCulloch (1992), 3.8: limits of the share from quantiles of F."""
    values, factors = crossed((1.0, 0.0, 1.0), (6, 5), 4)
    found = components(values, {"data": factors["data"]})
    assert found is not None
    table = values.reshape(6, 5)
    ratio = 5 * table.mean(axis=1).var(ddof=1) / table.var(axis=1, ddof=1).mean()
    quantiles = (3.154816, 0.159285)  # of F with 5 and 24 degrees of freedom, at 97.5 and 2.5 %
    limits = [(ratio / quantile - 1) / (5 + ratio / quantile - 1) for quantile in quantiles]
    assert found.parts[0].interval == pytest.approx(limits, abs=0.02)  # drawn 20,000 times


def test_the_shares_are_covered_in_an_unbalanced_design() -> None:
    hits = np.zeros(3)
    for seed in range(30):
        values, factors = crossed((0.7, 0.4, 0.6), (5, 5), seed)
        kept = np.random.default_rng(seed).permutation(25)[:19]
        found = components(values[kept], {name: [levels[i] for i in kept] for name, levels in factors.items()})
        assert found is not None
        true = np.array([0.49, 0.16, 0.36]) / 1.01
        hits += [p.interval[0] <= share <= p.interval[1] for p, share in zip(found.parts, true, strict=True)]
    assert (hits >= 25).all()  # at 95 %, fewer come once in 1000


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.floats(1e-3, 1e3), st.floats(-1e3, 1e3))
def test_shares_know_neither_unit_nor_origin_nor_the_names_of_levels(seed: int, scale: float, shift: float) -> None:
    values, factors = crossed((1.0, 0.5, 0.7), (3, 4), seed)
    first = components(values, factors)
    again = components(
        scale * values + shift, {name: [f"level {x}" for x in levels] for name, levels in factors.items()}
    )
    assert first is not None
    assert again is not None
    for one, other in zip(first.parts, again.parts, strict=True):
        assert one.share == pytest.approx(other.share, abs=1e-6)
        assert one.interval == pytest.approx(other.interval, abs=1e-6)
        assert 0.0 <= one.interval[0] <= one.interval[1] <= 1.0


def test_what_cannot_be_told_apart_is_named() -> None:
    values, factors = crossed((1.0, 0.5, 0.7), (4, 4), 1)
    design = {
        **factors,
        "sampling": factors["init"],
        "evaluation": [0] * 16,
        "order": list(range(16)),
        "half": [level // 2 for level in factors["data"]],
    }
    found = components(values, design)
    assert found is not None
    assert found.constant == ("evaluation",)
    assert found.in_rest == ("order",)
    assert found.together == (("init", "sampling"),)
    assert found.tangled == ("half",)  # two data seeds per half: the halves are explained by them
    assert [part.name for part in found.parts] == ["data", "init + sampling", REST]


def test_a_level_counts_within_its_group_and_means_of_groups_do_not() -> None:
    values, factors = crossed((1.0, 0.5, 0.7), (4, 4), 1)
    groups = [0] * 16 + [1] * 16
    twice = {name: levels * 2 for name, levels in factors.items()}
    other = crossed((1.0, 0.5, 0.7), (4, 4), 2)[0]
    near, far = (components(np.concatenate([values, other + gap]), twice, groups) for gap in (0.0, 100.0))
    assert near is not None
    assert far is not None
    assert [p.variance for p in near.parts] == pytest.approx([p.variance for p in far.parts], abs=1e-9)
    assert [part.df for part in near.parts] == [6, 6, 18]


def test_nothing_is_estimated_from_nothing() -> None:
    assert components(np.ones(8), {"data": [0, 0, 1, 1] * 2}) is None
    assert components(np.array([1.0, 2.0]), {"data": [0, 1]}, ["a", "b"]) is None
    with pytest.raises(ValueError, match="finite"):
        components(np.array([1.0, np.nan, 2.0]), {"data": [0, 0, 1]})
