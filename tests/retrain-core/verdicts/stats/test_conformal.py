"""Conformal forecasts, exact limits of shares and components of variance, against scipy and the textbook."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.verdicts.stats.binomial import (
    binomial_limits,
    held_out_limits,
    improvement_in_pairs,
    improvement_of_all_pairs,
    training_limits,
)
from retrain.verdicts.stats.conformal import forecast, left_out, needed_conditions
from retrain.verdicts.stats.paired import t_interval
from retrain.verdicts.stats.variance import REST, components

STORED = Path(__file__).with_name("curves.json")  # made by benchmarks/forecast_curves.py: date and versions inside


def reference(past, finals, conditions, new, alpha):
    """The algorithm once more, written from its description."""

    def features(curve):
        third = max(1, len(curve) // 3)
        newest = curve[-third:].mean()
        return np.array([1.0, newest, newest - curve[:third].mean(), curve[-1] - curve[0]])

    def fit(x, y):
        return np.linalg.solve(x.T @ x + 1e-2 * np.diag([0.0, 1.0, 1.0, 1.0]), x.T @ y)

    x, names = np.stack([features(curve) for curve in past]), np.array(conditions)
    labels, last = np.unique(names), x[:, 1]
    mass = []
    for label in labels:
        out = names == label
        errors = np.abs(finals[out] - last[out] - x[out] @ fit(x[~out], (finals - last)[~out]))
        mass += [(error, 1 / ((len(labels) + 1) * out.sum())) for error in errors]
    reach, total = math.inf, 0.0
    for error, weight in sorted(mass):
        total += weight
        if total >= 1 - alpha - 1e-12:
            reach = error
            break
    at = features(new)
    point = at[1] + at @ fit(x, finals - last)
    return point, point - reach, point + reach


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(2, 8), st.integers(1, 7), st.sampled_from([0.5, 0.8, 0.9]))
def test_it_is_the_reference(seed, groups, length, level):
    rng = np.random.default_rng(seed)
    conditions = [str(each) for each in rng.permutation(np.repeat(np.arange(groups), 3))]
    curves, finals = rng.random((3 * groups, length)), rng.random(3 * groups)
    found = forecast(curves, finals, conditions, curves[0] / 2, level=level)
    expected = reference(curves, finals, conditions, curves[0] / 2, 1 - level)
    assert (found.point, found.low, found.high) == pytest.approx(expected)
    assert math.isfinite(found.high - found.low) == (groups >= needed_conditions(level))
    order = rng.permutation(len(finals))
    again = forecast(curves[order], finals[order], [conditions[i] for i in order], curves[0] / 2, level=level)
    assert (again.low, again.high) == pytest.approx((found.low, found.high))


def test_impossible_input_is_refused_and_a_promise_has_its_price():
    assert [needed_conditions(level) for level in (0.5, 0.8, 0.9, 0.95)] == [1, 4, 9, 19]
    curves, finals = np.full((4, 2), 0.5), np.full(4, 0.5)
    for bad in (np.array([0.5, np.nan]), np.array([])):
        with pytest.raises(ValueError, match="finite"):
            forecast(curves, finals, list("aabb"), bad)
    with pytest.raises(ValueError, match="another one"):
        forecast(curves, finals, list("aaaa"), curves[0])


@pytest.mark.parametrize("seen", range(2, 13, 2))
def test_eighty_percent_intervals_hold_for_conditions_left_out_of_stored_runs(seen):
    stored = json.loads(STORED.read_text())
    rates = np.array([run["correct"] for run in stored["runs"]]) / stored["about"]["completions"]
    conditions = [run["condition"] for run in stored["runs"]]
    assert (len(rates), len(set(conditions)), rates.shape[1]) == (40, 10, 13)
    found = left_out(rates[:, :seen], rates[:, -1], conditions)
    assert all(math.isfinite(each.high - each.low) for each in found)
    held = [each.low <= final <= each.high for each, final in zip(found, rates[:, -1], strict=True)]
    assert np.mean(held) >= 0.75


VALUES = st.lists(st.integers(-5, 5), min_size=1, max_size=9).map(lambda values: np.array(values, dtype=float))
RATES = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0])), min_size=1, max_size=8)


@settings(max_examples=40)
@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))), st.sampled_from([0.8, 0.95]))
def test_the_limits_are_scipys(counts, level):
    right, total = counts
    want = stats.binomtest(right, total).proportion_ci(level, method="exact")
    assert binomial_limits(right, total, level=level) == pytest.approx((want.low, want.high), abs=1e-9)


def test_certainty_needs_more_than_agreement():
    assert binomial_limits(64, 64) == (pytest.approx(0.025 ** (1 / 64)), 1.0)
    assert binomial_limits(0, 64) == (0.0, pytest.approx(1 - 0.025 ** (1 / 64)))
    assert held_out_limits(np.ones(8), 64) == binomial_limits(64, 64)  # eight seeds, but the same examples
    assert training_limits(np.ones(8), 8) == binomial_limits(64, 64)  # eight seeds with eight prompts of their own
    low, high = binomial_limits(62.5, 64)
    assert (low, high) == (binomial_limits(62, 64)[0], binomial_limits(63, 64)[1])
    assert binomial_limits(0.1 * 3 * 10, 10) == binomial_limits(3, 10)  # 3.0000000000000004
    # A bootstrap says [1, 1] here.
    pairs, all_pairs = improvement_in_pairs(np.ones(8)), improvement_of_all_pairs(np.zeros(8), np.ones(8))
    assert pairs.interval == pytest.approx((0.025 ** (1 / 8), 1.0))
    assert all_pairs.interval == (pytest.approx(0.76, abs=0.02), 1.0)


@settings(max_examples=30)
@given(RATES, st.integers(1, 500))
def test_held_out_limits_hold_both_and_stay_in_range(rates, examples):
    rates_N = np.array(rates)
    low, high = held_out_limits(rates_N, examples)
    exact = binomial_limits(float(rates_N.mean()) * examples, examples)
    over_seeds = t_interval(rates_N) or exact
    assert 0.0 <= low <= min(exact[0], max(over_seeds[0], 0.0)) + 1e-12
    assert 1.0 >= high >= max(exact[1], min(over_seeds[1], 1.0)) - 1e-12
    assert low < high
    if len(rates) == 1:
        assert (low, high) == pytest.approx(exact)


@settings(max_examples=30)
@given(RATES, st.integers(1, 64))
def test_training_limits_are_students_within_range(rates, prompts):
    rates_N = np.array(rates)
    found, by_t = training_limits(rates_N, prompts), t_interval(rates_N)
    if by_t is None:
        assert found is None
        return
    assert 0.0 <= found[0] < found[1] <= 1.0
    if np.ptp(rates_N) > 1e-9:
        assert found == pytest.approx((max(0.0, by_t[0]), min(1.0, by_t[1])))


@pytest.mark.parametrize(("right", "total"), [(0, 0), (-1, 5), (6, 5), (math.nan, 5)])
def test_what_is_no_share_is_refused(right, total):
    with pytest.raises(ValueError, match="trials"):
        binomial_limits(right, total)
    for of_seeds in (lambda none: held_out_limits(none, 64), improvement_in_pairs):
        with pytest.raises(ValueError, match="trials"):
            of_seeds(np.zeros(0))


@settings(max_examples=15)
@given(VALUES)
def test_pairs_have_scipys_exact_limits(diffs_N):
    """Ties are wins in the upper limit and losses in the lower one: the interval of either reading is inside."""
    found = improvement_in_pairs(diffs_N)
    wins, ties = int((diffs_N > 0).sum()), int((diffs_N == 0).sum())
    assert found.probability == (wins + ties / 2) / diffs_N.size
    low, high = (stats.binomtest(count, diffs_N.size).proportion_ci(0.95) for count in (wins, wins + ties))
    assert found.interval == pytest.approx((low.low, high.high))


@settings(max_examples=15)
@given(VALUES, VALUES)
def test_all_pairs_are_the_mann_whitney_statistic(baseline_N, condition_M):
    found = improvement_of_all_pairs(baseline_N, condition_M)
    u = stats.mannwhitneyu(condition_M, baseline_N, alternative="greater").statistic
    assert found.probability == pytest.approx(u / (baseline_N.size * condition_M.size))
    low, high = found.interval
    assert 0.0 <= low <= found.probability <= high <= 1.0
    # Hanley and McNeil's variance at a limit, both sizes replaced by their mean, puts the estimate z of it away.
    size, z = (baseline_N.size + condition_M.size) / 2, stats.norm.ppf(0.975)
    for t in found.interval:
        if 0.0 < t < 1.0:
            numerator = t * (1 - t) + (size - 1) * (t / (2 - t) + 2 * t**2 / (1 + t) - 2 * t**2)
            distance = z * math.sqrt(numerator / (baseline_N.size * condition_M.size))
            assert abs(found.probability - t) == pytest.approx(distance, abs=1e-6)
    turned = improvement_of_all_pairs(condition_M, baseline_N)
    assert turned.interval == pytest.approx((1.0 - high, 1.0 - low), abs=1e-6)


def crossed(sds, sizes, seed):
    """A value per cell of data x initialisation, whose effects have these standard deviations; the last is the rest."""
    rng = np.random.default_rng(seed)
    data, init = (each.ravel() for each in np.indices(sizes))
    values = sds[0] * rng.normal(size=sizes[0])[data] + sds[1] * rng.normal(size=sizes[1])[init]
    return values + sds[2] * rng.normal(size=data.size), {"data": data.tolist(), "init": init.tolist()}


def test_balanced_estimates_and_intervals_are_those_of_the_textbook():
    values, factors = crossed((1.0, 0.5, 0.7), (5, 4), 3)
    found = components(values, factors)
    table = values.reshape(5, 4)
    rows, columns, mean = table.mean(axis=1), table.mean(axis=0), table.mean()
    rest = ((table - rows[:, None] - columns + mean) ** 2).sum() / 12
    expected = {"data": rows.var(ddof=1) - rest / 4, "init": columns.var(ddof=1) - rest / 5, REST: rest}
    assert {part.name: part.variance for part in found.parts} == pytest.approx(expected)
    assert [part.df for part in found.parts] == [4, 3, 12]
    assert sum(part.share for part in found.parts) == pytest.approx(1.0)
    small = components(1e-3 * values, factors)
    assert [part.variance for part in small.parts] == pytest.approx([1e-6 * part.variance for part in found.parts])
    seen, unseen, rest = components(*crossed((3.0, 0.0, 0.5), (6, 4), 1)).parts
    assert (seen.interval[0] > 0.0, unseen.interval[0], rest.interval[1] < 0.5) == (True, 0.0, True)
    # Searle, Casella, McCulloch (1992), 3.8: limits of the share from quantiles of F.
    values, factors = crossed((1.0, 0.0, 1.0), (6, 5), 4)
    found = components(values, {"data": factors["data"]})
    table = values.reshape(6, 5)
    ratio = 5 * table.mean(axis=1).var(ddof=1) / table.var(axis=1, ddof=1).mean()
    quantiles = (3.154816, 0.159285)  # of F with 5 and 24 degrees of freedom, at 97.5 and 2.5 %
    limits = [(ratio / quantile - 1) / (5 + ratio / quantile - 1) for quantile in quantiles]
    assert found.parts[0].interval == pytest.approx(limits, abs=0.02)  # drawn 20,000 times


def test_the_shares_are_covered_in_an_unbalanced_design():
    hits = np.zeros(3)
    for seed in range(30):
        values, factors = crossed((0.7, 0.4, 0.6), (5, 5), seed)
        kept = np.random.default_rng(seed).permutation(25)[:19]
        found = components(values[kept], {name: [levels[i] for i in kept] for name, levels in factors.items()})
        true = np.array([0.49, 0.16, 0.36]) / 1.01
        hits += [p.interval[0] <= share <= p.interval[1] for p, share in zip(found.parts, true, strict=True)]
    assert (hits >= 25).all()  # at 95 %, fewer come once in 1000


def test_inseparable_factors_are_named_and_levels_count_within_their_group():
    values, factors = crossed((1.0, 0.5, 0.7), (4, 4), 1)
    design = factors | {"sampling": factors["init"], "evaluation": [0] * 16, "order": list(range(16))}
    design |= {"half": [level // 2 for level in factors["data"]]}
    found = components(values, design)
    assert found.constant == ("evaluation",)
    assert found.in_rest == ("order",)
    assert found.together == (("init", "sampling"),)
    assert found.tangled == ("half",)  # two data seeds per half: the halves are explained by them
    assert [part.name for part in found.parts] == ["data", "init + sampling", REST]
    groups = [0] * 16 + [1] * 16
    twice = {name: levels * 2 for name, levels in factors.items()}
    other = crossed((1.0, 0.5, 0.7), (4, 4), 2)[0]
    near, far = (components(np.concatenate([values, other + gap]), twice, groups) for gap in (0.0, 100.0))
    assert [p.variance for p in near.parts] == pytest.approx([p.variance for p in far.parts], abs=1e-9)
    assert [part.df for part in near.parts] == [6, 6, 18]
    least = components(np.array([1.0, 2.0, 2.0, 1.5]), {"data": [0, 0, 1, 1], "init": [0, 1, 0, 1]}).parts[-1]
    assert (least.df, least.interval) == (1, (pytest.approx(0.0, abs=0.1), 1.0))
    assert components(np.ones(8), {"data": [0, 0, 1, 1] * 2}) is None
    assert components(np.array([1.0, 2.0]), {"data": [0, 1]}, ["a", "b"]) is None
    with pytest.raises(ValueError, match="finite"):
        components(np.array([1.0, np.nan, 2.0]), {"data": [0, 0, 1]})
