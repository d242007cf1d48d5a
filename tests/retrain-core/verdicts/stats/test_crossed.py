"""Crossed random effects of seeds and examples, their components, and the gain of more seeds or examples."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import kurtosis, t

from retrain.kernel.seeding import Seeds
from retrain.verdicts.stats.components import (
    Cost,
    Draws,
    Needed,
    Way,
    advise,
    components,
    draw_components,
    foreseen,
    half_widths,
    needed,
    numbers_needed,
    true_differences,
)
from retrain.verdicts.stats.crossed import MeanSquares, crossed


def _textbook(diffs_NE, level):
    """Two-way analysis of variance by explicit sums, as in Searle, Casella and McCulloch (1992), chapter 4."""
    n, m = diffs_NE.shape
    g = sum(diffs_NE[s, e] for s in range(n) for e in range(m)) / (n * m)
    row = [sum(diffs_NE[s]) / m for s in range(n)]
    col = [sum(diffs_NE[:, e]) / n for e in range(m)]
    ms_s = m * sum((r - g) ** 2 for r in row) / (n - 1)
    ms_e = n * sum((c - g) ** 2 for c in col) / (m - 1)
    rest = sum((diffs_NE[s, e] - row[s] - col[e] + g) ** 2 for s in range(n) for e in range(m))
    ms_r = rest / ((n - 1) * (m - 1))
    total = ms_s + ms_e - ms_r
    df = max(total**2 / (ms_s**2 / (n - 1) + ms_e**2 / (m - 1) + ms_r**2 / ((n - 1) * (m - 1))), n - 1)
    found = {}
    for name, ms, k in (("both", max(total, ms_s, ms_e), df), ("seeds", ms_s, n - 1), ("examples", ms_e, m - 1)):
        error = (ms / (n * m)) ** 0.5
        half = t.ppf(0.5 + level / 2, k) * error
        found[name] = (g - half, g + half, 2 * t.sf(abs(g) / error, k))
    return found


@settings(max_examples=25)
@given(n=st.integers(2, 9), m=st.integers(2, 20), seed=st.integers(0, 2**32), level=st.sampled_from([0.8, 0.95, 0.99]))
def test_the_three_scopes_are_those_of_the_textbook(n, m, seed, level):
    rng = np.random.default_rng(seed)
    diffs_NE = rng.normal(0.1, 1, (n, 1)) + rng.normal(0, 2, (1, m)) + rng.normal(0, 1, (n, m))
    result, expected = crossed(diffs_NE, level=level), _textbook(diffs_NE, level)
    for name in ("both", "seeds", "examples"):
        found = getattr(result, name)
        assert (*found.interval, found.p) == pytest.approx(expected[name], rel=1e-10, abs=1e-12)
    assert result.squares.kurtosis == pytest.approx(kurtosis(diffs_NE.mean(axis=0)))


def test_clusters_count_for_as_much_as_their_means():
    diffs_NE = np.random.default_rng(1).normal(size=(6, 24))
    means_NC = diffs_NE.reshape(6, 8, 3).mean(axis=2)
    clustered = crossed(diffs_NE, clusters_E=[str(e // 3) for e in range(24)])
    plain = crossed(means_NC)
    for name in ("both", "seeds", "examples"):
        assert getattr(clustered, name).interval == pytest.approx(getattr(plain, name).interval, abs=1e-13)
    means_NC = np.random.default_rng(2).normal(size=(8, 10))
    copies_NE = np.repeat(means_NC, 6, axis=1)
    honest = crossed(copies_NE, clusters_E=[str(e // 6) for e in range(60)])
    fooled, alone = crossed(copies_NE), crossed(means_NC)
    assert honest.both.interval == pytest.approx(alone.both.interval, abs=1e-12)
    assert np.diff(fooled.both.interval)[0] < 0.9 * np.diff(alone.both.interval)[0]


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32), names=st.lists(st.sampled_from("abcdef"), min_size=12, max_size=12))
def test_unequal_clusters_leave_the_mean_and_the_seeds_alone(seed, names):
    diffs_NE = np.random.default_rng(seed).normal(size=(5, 12))
    clustered, plain = crossed(diffs_NE, clusters_E=names), crossed(diffs_NE)
    assert clustered.mean == pytest.approx(diffs_NE.mean(), abs=1e-14)
    assert clustered.seeds.interval == pytest.approx(plain.seeds.interval, abs=1e-12)
    assert clustered.squares.num_clusters == len(set(names))
    if clustered.examples:
        assert 1.0 <= clustered.examples.df <= len(set(names)) - 1.0 + 1e-9


def test_mean_squares_of_unequal_clusters_are_unbiased():
    """The expectation of a square of independent effects of variance 1 is its sum over those of one effect alone."""
    names, weight_C = ["a", "b", "b", "c", "c"], np.array([0.2, 0.4, 0.4])
    column_E, of_mean = [0, 1, 1, 2, 2], float((weight_C**2).sum())  # the variance of the mean
    alone = [crossed(np.tile(unit_C[column_E], (4, 1)), clusters_E=names) for unit_C in np.eye(3)]
    assert sum(each.squares.clusters for each in alone) / 12 == pytest.approx(of_mean)
    alone = [crossed(unit_SC.reshape(4, 3)[:, column_E], clusters_E=names) for unit_SC in np.eye(12)]
    assert sum(each.squares.rest for each in alone) / 12 == pytest.approx(of_mean / 4)
    effects = [crossed(np.tile(unit_S[:, None], 5), clusters_E=names).squares for unit_S in np.eye(4)]
    assert [(each.clusters, each.rest) for each in effects] == [pytest.approx((0.0, 0.0), abs=1e-12)] * 4
    assert effects[0].df_clusters == pytest.approx(of_mean**2 / (weight_C**4).sum() - 1)


def test_too_little_data_infers_nothing_and_odd_data_is_refused():
    one_seed, one_example = crossed(np.array([[0.1, 0.2, 0.4]])), crossed(np.array([[0.1], [0.2], [0.4]]))
    one_cluster = crossed(np.array([[0.1, 0.2], [0.3, 0.1]]), clusters_E=["a", "a"])
    for found, known in ((one_seed, "examples"), (one_example, "seeds"), (one_cluster, "seeds")):
        assert [name for name in ("both", "seeds", "examples") if getattr(found, name)] == [known]
    equal = crossed(np.full((4, 5), 0.1))  # 0.1 has no exact mean: rounding must not become a spread
    assert (equal.both, equal.seeds, equal.examples) == (None, None, None)
    for bad in (np.zeros(3), np.zeros((0, 3)), np.array([[0.0, np.nan]]), np.array([[np.inf, 0.0]])):
        with pytest.raises(ValueError, match="seed"):
            crossed(bad)
    with pytest.raises(ValueError, match="1 clusters for 2 examples"):
        crossed(np.zeros((2, 2)), clusters_E=["a"])
    with pytest.raises(ValueError, match="two seeds"):
        draw_components(crossed(np.array([[0.1, 0.2]])).squares)


def _draws(n, m, seed_sd, example_sd, rest_sd=1.0):
    rng = np.random.default_rng(7)
    effects = rng.normal(0, seed_sd, (n, 1)) + rng.normal(0, example_sd, (1, m))
    return draw_components(crossed(effects + rng.normal(0, rest_sd, (n, m))).squares)


def test_components_are_found_and_give_the_crossed_interval():
    drawn = _draws(60, 80, 0.5, 2.0)
    found, narrow = components(drawn), components(drawn, level=0.5)
    for wide, half in ((found.seed, narrow.seed), (found.cluster, narrow.cluster), (found.rest, narrow.rest)):
        edges = (wide.interval[0], half.interval[0], half.interval[1], wide.interval[1])
        assert edges == tuple(sorted(set(edges)))
    for part, true in ((found.seed, 0.5), (found.cluster, 2.0), (found.rest, 1.0)):
        assert part.interval[0] <= true <= part.interval[1]
        assert part.sd == pytest.approx(true, rel=0.25)
        assert part.interval[0] <= part.sd <= part.interval[1]
    assert found.seed.share + found.cluster.share + found.rest.share == pytest.approx(1.0)
    assert found.cluster.share > 0.8  # 4/80 against 0.25/60


SQUARES = MeanSquares(seeds=9.0, clusters=4.0, rest=1.0, num_seeds=5, num_clusters=8, df_clusters=6.0, kurtosis=2.0)


@pytest.mark.parametrize(("tail", "df"), [(2.0, 2 / (2 / 6 + 2 / 8)), (-1.0, 6.0)])
def test_components_and_their_draws_are_those_of_the_description(tail, df):
    draws, stream = draw_components(replace(SQUARES, kurtosis=tail)), Seeds(0).stream("compare", "components")
    drawn = [np.append(ms, k * ms / stream.chisquare(k, 400)) for ms, k in ((9.0, 4.0), (4.0, df), (1.0, 24.0))]
    seed_D, cluster_D = np.maximum(drawn[0] - drawn[2], 0) / 8, np.maximum(drawn[1] - drawn[2], 0) / 5
    found, shares = components(draws, level=0.9), (2 / 3, 1 / 4, 1 / 12)  # of 1/5 + 0.6/8 + 1/40
    parts = zip((found.seed, found.cluster, found.rest), (seed_D, cluster_D, drawn[2]), shares, strict=True)
    for part, variance_D, share in parts:
        assert (part.sd, part.share) == pytest.approx((variance_D[0] ** 0.5, share))
        assert part.interval == pytest.approx(np.quantile(variance_D[1:] ** 0.5, [0.05, 0.95]))
    noise_D = np.append(0.0, Seeds(0).stream("compare", "true difference").standard_normal(401)[1:])
    sd_D = (seed_D / 5 + cluster_D / 8 + drawn[2] / 40) ** 0.5
    assert true_differences(draws, -0.5) == pytest.approx(np.abs(noise_D * sd_D - 0.5))


@pytest.mark.parametrize(
    ("n", "m", "seed", "cluster", "rest", "near"),
    [(201, 300, 1, 0.6, 1, 2e-7), (300, 201, 1, 0.6, 1, 2e-7), (60, 60, 0.8e-6, 0.8e-6, 60e-6, 1e-5)],
)
def test_half_widths_are_students_with_satterthwaites_degrees(n, m, seed, cluster, rest, near):
    of_each = {"seed_D": seed, "cluster_D": cluster, "rest_D": rest}
    draws = Draws(**{name: np.array([each]) for name, each in of_each.items()}, num_seeds=5, num_clusters=8)
    seeds, clusters = rest + m * seed, rest + n * cluster
    total = seeds + clusters - rest
    df = max(total**2 / (seeds**2 / (n - 1) + clusters**2 / (m - 1) + rest**2 / ((n - 1) * (m - 1))), n - 1)
    for level, power, z in ((0.95, 0.5, 0.0), (0.8, 0.8, 0.8416212335729143)):
        half = float(half_widths(draws, seeds=n, clusters=m, level=level, power=power)[0])
        assert half == pytest.approx((t.ppf(0.5 + level / 2, df) + z) * (total / (n * m)) ** 0.5, rel=near)


@pytest.mark.parametrize(
    ("n", "m", "seed_sd", "example_sd"),
    [(9, 30, 1, 1), (6, 8, 2, 1), (20, 6, 1, 3), (3, 9, 0.1, 4), (3, 8, 0.3, 0.3), (4, 6, 0.5, 0.5)],
)
def test_half_widths_are_those_of_the_crossed_interval(n, m, seed_sd, example_sd):
    rng = np.random.default_rng(3)
    effects_NM = rng.normal(0, seed_sd, (n, 1)) + rng.normal(0, example_sd, (1, m))
    result = crossed(effects_NM + rng.normal(0, 1, (n, m)))
    assert result.both.df >= 5.0
    half = float(half_widths(draw_components(result.squares), seeds=n, clusters=m, level=0.95)[0])
    assert half == pytest.approx(np.diff(result.both.interval)[0] / 2, rel=0.01)


def test_a_number_needed_is_the_fewest():
    draws = _draws(8, 40, 1.0, 1.0)
    differences_D = np.full(draws.rest_D.size, 0.9)
    for of_seeds in (True, False):
        numbers_D = numbers_needed(draws, differences_D, of_seeds=of_seeds, level=0.95)
        for shift, is_enough in ((0.0, True), (-1.0, False)):
            number_D = numbers_D + shift
            seeds, clusters = (number_D, 40) if of_seeds else (8, number_D)
            checked_D = np.isfinite(numbers_D) & (numbers_D > (8 if of_seeds else 40))
            with np.errstate(invalid="ignore"):
                reach_D = half_widths(draws, seeds=seeds, clusters=clusters, level=0.95, power=0.8)
            assert checked_D.any()
            assert ((reach_D <= differences_D) == is_enough)[checked_D].all()


def test_the_number_needed_of_the_estimate_has_the_interval_of_the_draws():
    assert needed(np.array([5.0, 9.0, 1.0, 3.0])) == Needed(number=5, interval=(1, 9))
    assert needed(np.array([np.inf, 2.0, np.inf])) == Needed(number=None, interval=(2, None))


def test_numbers_needed_are_the_fewest_and_unclear_ones_are_not_given():
    draws = _draws(8, 10, 0.1, 3.0, 0.1)
    differences_D = true_differences(draws, 0.8)
    assert needed(numbers_needed(draws, differences_D, of_seeds=True, level=0.95)).number is None
    examples = needed(numbers_needed(draws, differences_D, of_seeds=False, level=0.95))
    assert 20 < examples.number < 1000
    assert foreseen(draws, seeds=8, clusters=20, level=0.95).half_width < 0.8 * float(
        half_widths(draws, seeds=16, clusters=10, level=0.95)[0]
    )
    differences_D = true_differences(_draws(8, 40, 1.0, 1.0), -0.9)
    assert differences_D[0] == 0.9
    assert (differences_D >= 0).all()
    assert np.ptp(differences_D) > 0.5
    advice = _advice(_draws(8, 40, 1.0, 1.0))
    clear, wide, open_ = (Needed(number=9, interval=interval) for interval in ((8, 32), (8, 33), (8, None)))
    for seeds, examples in ((clear, wide), (wide, clear), (open_, clear), (clear, open_)):
        each = replace(advice, seeds=seeds, examples=examples)
        assert [each.is_clear(way) for way in (Way.SEEDS, Way.EXAMPLES)] == [seeds is clear, examples is clear]


def _advice(draws, **more):
    fixed = {"difference": 0.9, "half_width": 1.0, "level": 0.95, "num_examples": 80, "least_seeds": 6, "cost": None}
    return advise(draws, **{**fixed, **more})


def test_the_advice_counts_examples_of_clusters_and_the_seeds_that_a_verdict_needs():
    draws = _draws(8, 40, 1.0, 1.0)
    found, single, part = (_advice(draws, num_examples=number) for number in (80, 40, 50))
    clusters_D = numbers_needed(draws, true_differences(draws, 0.9), of_seeds=False, level=0.95)
    assert part.examples == needed(np.ceil(1.25 * clusters_D))
    assert found.twice_seeds.half_width == half_widths(draws, seeds=16, clusters=40, level=0.95)[0]
    assert (found.half_width, found.cheaper, found.chance) == (1.0, None, None)
    assert found.seeds.number is not None
    assert single.examples.number is not None
    assert 0 <= 2 * single.examples.number - found.examples.number < 2  # two examples in a cluster
    today = foreseen(draws, seeds=8, clusters=40, level=0.95).half_width
    assert found.twice_seeds == foreseen(draws, seeds=16, clusters=40, level=0.95)
    assert found.twice_examples == foreseen(draws, seeds=8, clusters=80, level=0.95)
    assert max(found.twice_seeds.half_width, found.twice_examples.half_width) < today
    few = _advice(draws, least_seeds=60)
    assert (few.seeds.number >= 60, few.examples.number) == (True, None)


def test_the_cheaper_way_is_named_only_where_most_draws_agree():
    seen = set()
    for draws in (_draws(8, 40, 1.0, 1.0), _draws(8, 40, 1.0, 2.0), _draws(12, 40, 1.0, 3.0)):
        costs = [Cost(seed_s=2.0**power, example_s=1.0) for power in range(-8, 13, 4)]
        found = [_advice(draws, cost=cost) for cost in costs]
        assert [each.chance for each in found] == sorted(each.chance or 0.0 for each in found)
        differences_D = true_differences(draws, 0.9)
        seeds_D, clusters_D = (numbers_needed(draws, differences_D, of_seeds=of, level=0.95) for of in (True, False))
        more_D = np.maximum(seeds_D, 6) - draws.num_seeds, np.ceil(2.0 * clusters_D) - 80
        pairs = [(a, b) for a, b in zip(*more_D, strict=True) if min(a, b) < np.inf and max(a, b) > 0.0]
        for cost, each in zip(costs, found, strict=True):
            assert each.chance == np.mean([b * cost.example_s < a * cost.seed_s for a, b in pairs])
        for each in found:
            expected = Way.EXAMPLES if each.chance >= 0.8 else Way.SEEDS if each.chance <= 0.2 else None
            assert each.cheaper is expected
            seen.add(expected)
    assert seen == {Way.EXAMPLES, Way.SEEDS, None}
