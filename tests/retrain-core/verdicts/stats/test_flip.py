"""The sign-flip test and its interval: against counting, scipy and Hartigan's subset means, and against each other."""

import math
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.kernel.seeding import Seeds
from retrain.records.runs.registered import Spend
from retrain.verdicts.stats import sequential
from retrain.verdicts.stats.flip import FlipTest, at_most
from retrain.verdicts.stats.sequential import AnytimeTest, SequentialFlip, fewest_equal, running_evidence, spent

DIFFS = st.lists(st.integers(-20, 20), min_size=1, max_size=9)
ALPHAS = st.one_of(st.floats(0.001, 0.4), st.sampled_from([0.05, 0.1, 0.05 / 3, 0.05 / 19, 1 / 32, 3 / 64, 0.25]))


def hartigan(diffs, level):
    """Hartigan's typical values by their definition: all subset means in order, k counted off from either end."""
    subsets = [each for size in range(1, len(diffs) + 1) for each in combinations(diffs, size)]
    means = sorted(sum(each) / len(each) for each in subsets)
    k = math.floor((1 - level) / 2 * (len(means) + 1) + 1e-9)
    return (means[k - 1], means[-k]) if k else (-math.inf, math.inf)


def leaves_out_zero(interval):
    return interval[0] > 0.0 or interval[1] < 0.0


@settings(max_examples=50)
@given(DIFFS)
def test_p_is_the_share_of_sign_patterns(diffs):
    sums = [abs(sum(s * d for s, d in zip(signs, diffs, strict=True))) for signs in product((1, -1), repeat=len(diffs))]
    want = sum(each >= abs(sum(diffs)) for each in sums) / len(sums)
    assert FlipTest.of(np.array(diffs, dtype=float)).p == want
    assert FlipTest.of(np.array(diffs) / 1000).p == want  # where sums of equal patterns differ in the last digit


@settings(max_examples=50)
@given(DIFFS, st.sampled_from([0.5, 0.8, 0.9, 0.95, 0.99, 1 - 0.05 / 19]))
def test_the_interval_is_hartigans(diffs, level):
    assert FlipTest.of(np.array(diffs, dtype=float)).interval(level) == pytest.approx(hartigan(diffs, level), abs=1e-12)


@example(diffs=[1, 1, 1, 1, 1, 1], alpha=1 / 32, scale=1e-3, extra=0)
@example(diffs=[0, 0, 0, 0, 0, 0], alpha=0.05, scale=1.0, extra=0)
@example(diffs=[3, -3, 2, -2, 1, -1], alpha=0.25, scale=1e300, extra=9)
@settings(max_examples=60)
@given(
    diffs=DIFFS,
    alpha=ALPHAS,
    scale=st.sampled_from([1.0, 0.1, 1 / 3, 1e-3, 1e-300, 1e300]),
    extra=st.sampled_from([0, 0, 0, 9, 30]),
)
def test_the_interval_leaves_out_zero_exactly_where_the_test_rejects(diffs, alpha, scale, extra):
    """Ties, zeros, any unit, and beyond 14 seeds as well, where patterns are drawn."""
    diffs_N = np.resize(np.array(diffs, dtype=float), len(diffs) + extra) * scale
    test = FlipTest.of(diffs_N, patterns=500)
    interval = test.interval(1.0 - alpha)
    assert leaves_out_zero(interval) == at_most(test.p, alpha)
    assert 0.0 < test.smallest_p <= test.p <= 1.0
    slack = 1e-9 * float(np.abs(diffs_N).max())
    assert interval[0] - slack <= diffs_N.mean() <= interval[1] + slack
    assert math.isinf(interval[0]) == math.isinf(interval[1]) == (not at_most(1 / (test.means_K.size // 2), alpha))


@pytest.mark.parametrize("num_seeds", [15, 40])
def test_drawn_patterns_are_those_of_scipy_up_to_monte_carlo_error(num_seeds):
    diffs_N = np.random.default_rng(num_seeds).normal(0.35, 1.0, num_seeds)

    def mean(x, axis=-1):
        return x.mean(axis=axis)

    options = {"permutation_type": "samples", "vectorized": True, "n_resamples": 20_000}
    want = stats.permutation_test((diffs_N,), mean, **options, rng=np.random.default_rng(1)).pvalue
    assert FlipTest.of(diffs_N).p == pytest.approx(want, abs=5 * math.sqrt(want * (1 - want) * 1.5 / 10_000))
    low, high = FlipTest.of(diffs_N).interval(0.95)
    by_t = stats.t.interval(0.95, num_seeds - 1, diffs_N.mean(), stats.sem(diffs_N))
    assert (low, high) == pytest.approx(by_t, abs=0.12 * (by_t[1] - by_t[0]))


def test_exact_and_drawn_patterns_meet_at_the_border(monkeypatch):
    diffs_N = np.random.default_rng(3).normal(0.6, 1.0, 14)
    exact = FlipTest.of(diffs_N)
    monkeypatch.setattr("retrain.verdicts.stats.flip.EXACT_SEEDS", 2)
    drawn = FlipTest.of(diffs_N, patterns=50_000)
    assert (exact.means_K.size, drawn.means_K.size) == (2 * 8192, 2 * 50_000)
    assert drawn.p == pytest.approx(exact.p, abs=5 * math.sqrt(exact.p / 50_000))
    assert drawn.interval(0.95) == pytest.approx(exact.interval(0.95), abs=0.03)
    # Of three seeds, many drawn patterns turn no sign or all: these bound nothing.
    again = FlipTest.of(diffs_N[:3], patterns=4_000)
    assert again.p == pytest.approx(FlipTest.of(diffs_N[:3]).p, abs=0.05)
    assert again.interval(0.95) == (-math.inf, math.inf)


def test_a_seed_without_a_difference_counts_for_nothing_in_the_best_case():
    test = FlipTest.of(np.array([5.0, 6, 7, 8, 9, 0]))
    assert (test.p, test.smallest_p) == (0.0625, 0.0625)  # as with five seeds
    assert FlipTest.of(np.array([5.0, -6, 7, 8, 9, 1])).smallest_p == 0.03125
    assert FlipTest.of(np.zeros(20)).smallest_p == 1.0


@pytest.mark.parametrize("diffs", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_what_is_no_difference_is_refused(diffs):
    with pytest.raises(ValueError, match="finite"):
        FlipTest.of(np.array(diffs))


VALUES = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e3, 1e3, allow_nan=False, width=32))


def after(diffs, looks, n_max, spend=Spend.POCOCK, drawn=499):
    diffs_N = np.array(diffs, dtype=float)
    taken = [n for n in looks if n <= diffs_N.size]
    shares = [n / n_max for n in taken]
    return SequentialFlip(diffs_N=diffs_N, counts_K=taken, shares_K=shares, n_max=n_max, spend=spend, drawn=drawn)


def described(diffs_N, looks, alpha, spend, signs_PN):
    """The look that rejects, straight from the description; row 0 of the patterns is the observed one."""
    sizes_N = np.abs(diffs_N)
    signed_PN = signs_PN[:, : diffs_N.size] * sizes_N
    alive_P, total = np.ones(len(signs_PN), dtype=bool), len(signs_PN)
    for look, n in enumerate(n for n in looks if n <= diffs_N.size):
        budget = math.floor(spent(alpha, n / looks[-1], spend) * total + 1e-9) - int((~alive_P).sum())
        scale = max(float(np.sqrt((sizes_N[:n] ** 2).sum())), 1e-300)
        t_P = np.where(alive_P, np.abs(signed_PN[:, :n].sum(axis=1)) / scale, -1.0)
        if budget > 0:
            order = np.sort(t_P)[::-1]
            out_P = t_P > (order[budget] if budget < order.size else -1.0) + 1e-9
            if out_P[0]:
                return look
            alive_P &= ~out_P
    return None


@pytest.mark.parametrize("spend", list(Spend))
@pytest.mark.parametrize(("n_max", "looks"), [(9, [6, 7, 9]), (16, [6, 9, 12, 16])])
def test_rejects_where_its_description_does(spend, n_max, looks):
    rng = np.random.default_rng([3, n_max])
    for size in [*looks, looks[0] + 1] * 4:
        diffs_N = rng.normal(rng.choice([0.0, 1.0, -1.5]), 1.0, size)
        observed_N = np.where(diffs_N < 0, -1.0, 1.0)
        if n_max > sequential.EXACT_SEEDS:
            others = sequential._patterns(n_max, 499).T[:, :size]
        else:
            others = [signs for signs in product((1.0, -1.0), repeat=size) if signs != tuple(observed_N)]
        signs_PN = np.vstack([observed_N, others])
        for alpha in (0.05, 0.0125, 0.3):
            found = after(diffs_N, looks, n_max, spend).rejected_at(alpha)
            assert found == described(diffs_N, looks, alpha, spend, signs_PN)


def test_alpha_is_spent_as_published_and_lost_seeds_change_nothing_of_it():
    assert spent(0.05, 0.5, Spend.POCOCK) == pytest.approx(0.05 * math.log(1 + (math.e - 1) / 2))
    assert spent(0.05, 0.5, Spend.OBRIEN_FLEMING) == pytest.approx(0.00557, abs=1e-5)  # Lan & DeMets 1983, table 1
    assert spent(0.05, 0.25, Spend.OBRIEN_FLEMING) == pytest.approx(0.0000886, abs=1e-6)
    for spend in Spend:
        assert spent(0.05, 1.0, spend) == 0.05
        assert 0.0 < spent(0.01, 0.6, spend) < spent(0.02, 0.6, spend) < spent(0.02, 0.8, spend) < 0.02
    test = after([1.0, 2.0, 3.0], [6, 8], 8)
    assert (test.p, test.smallest_p, test.interval(0.95)) == (1.0, 1.0, (-math.inf, math.inf))
    whole = after(np.arange(1.0, 9.0), [6, 8], 8)
    fewer = SequentialFlip(
        diffs_N=np.arange(1.0, 7.0), counts_K=[4, 6], shares_K=[6 / 8, 1.0], n_max=8, spend=Spend.POCOCK
    )
    assert whole.rejected_at(0.05) == 0  # all of one sign: 2 / 2^6 is spent by then
    assert fewer.rejected_at(0.05) == 1  # with four differences nothing can be


@settings(max_examples=25)
@given(
    diffs=st.lists(VALUES, min_size=6, max_size=17),
    n_max=st.sampled_from([10, 17]),
    alpha=st.sampled_from([0.05, 0.025, 0.2]),
    spend=st.sampled_from(list(Spend)),
)
def test_interval_and_p_agree(diffs, n_max, alpha, spend):
    looks = [n for n in (6, 8, 10, 13, 17) if n <= n_max]
    test = after(diffs[:n_max], looks, n_max, spend, drawn=199)
    low, high = test.interval(1.0 - alpha)
    mean = float(np.mean(diffs[:n_max]))
    assert low <= mean <= high
    assert (low > 0.0 or high < 0.0) == (test.p <= alpha)
    assert test.smallest_p <= test.p + 1e-6


@settings(max_examples=20)
@given(diffs=st.lists(VALUES, min_size=17, max_size=17), n_max=st.sampled_from([12, 17]))
def test_a_decision_is_never_taken_back(diffs, n_max):
    looks = [n for n in (6, 8, 10, 12, 17) if n <= n_max]
    p_values = [after(diffs[:n], looks, n_max).p for n in looks]
    assert p_values == sorted(p_values, reverse=True)
    decided = [after(diffs[:n], looks, n_max).rejected_at(0.05) for n in looks]
    first = next((look for look in decided if look is not None), None)
    assert all(look == first for look in decided[first:] if first is not None)


def test_over_all_patterns_no_more_than_alpha_is_rejected():
    """Exact: of the 2^8 equally likely outcomes at most 5 % are ever called a difference."""
    sizes_N = np.array([0.3, 1.0, 1.1, 2.0, 0.7, 0.2, 1.7, 0.9])
    outcomes = [np.array(signs) * sizes_N for signs in product((1.0, -1.0), repeat=8)]
    for spend in Spend:
        found = [after(diffs_N, [6, 7, 8], 8, spend).rejected_at(0.05) is not None for diffs_N in outcomes]
        assert 0.02 <= np.mean(found) <= 0.05


def test_the_smallest_p_of_equal_signs_is_one_pattern_pair_after_whatever_was_spent():
    ones_N = np.ones(8)
    assert after(ones_N, [8], 8).p == pytest.approx(2 / 2**8, abs=1e-7)
    assert after(ones_N, [8], 8).smallest_p == pytest.approx(2 / 2**8, abs=1e-7)
    assert after(ones_N[:6], [6, 8], 8).p == pytest.approx(2 / 2**6 / math.log1p((math.e - 1) * 6 / 8), abs=1e-7)
    assert after([1.0, -1.0] * 4, [8], 8).p == 1.0
    assert after(np.ones(14), [14], 14).p == pytest.approx(2 / 2**14, abs=1e-7)
    assert after(np.ones(15), [15], 15).p == pytest.approx(1 / 500, abs=1e-7)  # drawn, the observed pattern among them
    assert after(np.ones(40), [40], 40, drawn=sequential.DRAWN).p == pytest.approx(1e-4, abs=1e-7)


@pytest.mark.parametrize(("n_max", "effect", "spend"), [(16, 0.5, Spend.POCOCK), (10, -0.7, Spend.OBRIEN_FLEMING)])
def test_futures_continue_the_trend_and_are_tested_at_every_look(n_max, effect, spend):
    """One seed of the first six was lost, so later looks have one difference less than planned."""
    diffs_N = np.random.default_rng(4).normal(effect, 1.0, 7)  # the last two are not of a look yet
    wins, shares = [0, 0], [6 / n_max, 8 / n_max, 1.0]
    mean, sd = diffs_N[:5].mean(), diffs_N[:5].std(ddof=1)
    coming_FN = mean + sd * Seeds(0).stream("compare", "futures", n_max).standard_normal((200, n_max - 6))
    for coming_N in coming_FN:
        whole_N = np.append(diffs_N[:5], coming_N)
        given = {"counts_K": [5, 7, n_max - 1], "shares_K": shares, "n_max": n_max, "spend": spend}
        test = SequentialFlip(diffs_N=whole_N, **given, drawn=999)
        wins[int(whole_N.sum() > 0)] += test.rejected_at(0.1) is not None
    planned = {"counts_K": [5], "looks": [6, 8, n_max], "spend": spend, "alpha": 0.1}
    found = sequential.conditional_powers(diffs_N, **planned)
    assert found == (wins[0] / 200, wins[1] / 200)
    assert 0.05 < sum(found) < 0.95
    three = planned | {"counts_K": [3], "looks": [3, 4]}  # of four seeds no p is so small
    assert sequential.conditional_powers(diffs_N, **three) == (0.0, 0.0)


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts_K": [6], "shares_K": [0.5, 1.0]},
        {"counts_K": [9], "shares_K": [1.0]},
        {"counts_K": [6, 4], "shares_K": [0.5, 1.0]},
        {"diffs_N": np.array([1.0] * 7 + [math.nan])},
    ],
)
def test_refuses_what_cannot_be(wrong):
    given = {"diffs_N": np.ones(8), "counts_K": [8], "shares_K": [1.0], "n_max": 8, "spend": Spend.POCOCK} | wrong
    with pytest.raises(ValueError):  # noqa: PT011 - one of two, both of numbers
        SequentialFlip(**given)


def test_the_anytime_test_agrees_with_its_description():
    diffs_N = np.random.default_rng(5).normal(0.7, 1.0, 20)
    evidence, products = [], np.ones(8)
    for n in range(1, 21):
        x = diffs_N[n - 1] / math.sqrt(np.mean(diffs_N[:n] ** 2))
        products *= [2 / (1 + math.exp(-2 * bet * x)) for bet in (0.4, 0.8, 1.6, 3.2, -0.4, -0.8, -1.6, -3.2)]
        evidence.append(products.mean())
    assert running_evidence(diffs_N) == pytest.approx(evidence, rel=1e-12)
    assert AnytimeTest(diffs_N=diffs_N).p == pytest.approx(1 / max(evidence))
    assert running_evidence(np.full(7, 0.1))[-1] == pytest.approx(33.5, abs=0.05)
    assert [AnytimeTest(diffs_N=np.full(n, 3.0)).p <= 0.05 for n in (6, 7)] == [False, True]
    test = AnytimeTest(diffs_N=1e6 ** np.arange(5))  # each dwarfs those before it: no p of five is less
    assert test.p == pytest.approx(test.smallest_p)
    diffs_N = np.random.default_rng(2).normal(1.0, 1.0, 16)
    p_values = [AnytimeTest(diffs_N=diffs_N[:n]).p for n in range(1, 17)]
    assert p_values == sorted(p_values, reverse=True)
    assert AnytimeTest(diffs_N=diffs_N[:4]).interval(0.95) == (-math.inf, math.inf)
    assert math.isinf(AnytimeTest(diffs_N=np.array([])).interval(0.95)[0])
    assert [fewest_equal(alpha) for alpha in (1.0, 0.05, 0.005, 1e-100)] == [1, 7, 10, 200]
    with pytest.raises(ValueError, match="not finite"):
        running_evidence(np.array([1.0, math.inf]))


@settings(max_examples=20)
@given(sizes=st.lists(st.floats(0.0, 1e3, width=32), min_size=1, max_size=7))
def test_its_mean_over_all_signs_is_one(sizes):
    ends = [running_evidence(np.array(signs) * np.array(sizes))[-1] for signs in product((1, -1), repeat=len(sizes))]
    assert np.mean(ends) == pytest.approx(1.0, rel=1e-9)


@settings(max_examples=30)
@given(diffs=st.lists(VALUES, min_size=1, max_size=20), alpha=st.sampled_from([0.05, 0.0125, 0.3]))
def test_anytime_interval_and_p_agree(diffs, alpha):
    test = AnytimeTest(diffs_N=np.array(diffs))
    low, high = test.interval(1.0 - alpha)
    assert low <= np.mean(diffs) <= high
    assert (low > 0.0 or high < 0.0) == (test.p <= alpha)
    assert test.smallest_p <= test.p * (1 + 1e-9)


@settings(max_examples=25)
@given(diffs=st.lists(VALUES, min_size=2, max_size=12), scale=st.sampled_from([1e-200, 1e-3, 1e150]))
def test_the_unit_does_not_matter(diffs, scale):
    assert running_evidence(np.array(diffs) * scale) == pytest.approx(running_evidence(np.array(diffs)), rel=1e-9)
