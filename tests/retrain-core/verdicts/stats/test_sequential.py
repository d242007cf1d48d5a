"""Tests for several looks, planned or at any time: against independent descriptions, and their promises one by one."""

from __future__ import annotations

import math
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.types import Floats
from retrain.records.runs.registered import Spend
from retrain.verdicts.stats import sequential
from retrain.verdicts.stats.sequential import AnytimeTest, SequentialFlip, running_evidence, spent

VALUES = st.one_of(st.integers(-3, 3).map(float), st.floats(-1e3, 1e3, allow_nan=False, width=32))


def after(diffs: object, looks: list[int], n_max: int, spend: Spend = Spend.POCOCK, drawn: int = 499) -> SequentialFlip:
    diffs_N = np.array(diffs, dtype=float)
    taken = [n for n in looks if n <= diffs_N.size]
    shares = [n / n_max for n in taken]
    return SequentialFlip(diffs_N=diffs_N, counts_K=taken, shares_K=shares, n_max=n_max, spend=spend, drawn=drawn)


def described(diffs_N: Floats, looks: list[int], alpha: float, spend: Spend, signs_PN: Floats) -> int | None:
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
def test_rejects_where_its_description_does(spend: Spend, n_max: int, looks: list[int]) -> None:
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


def test_alpha_is_spent_as_published() -> None:
    assert spent(0.05, 0.5, Spend.POCOCK) == pytest.approx(0.05 * math.log(1 + (math.e - 1) / 2))
    assert spent(0.05, 0.5, Spend.OBRIEN_FLEMING) == pytest.approx(0.00557, abs=1e-5)  # Lan & DeMets 1983, table 1
    assert spent(0.05, 0.25, Spend.OBRIEN_FLEMING) == pytest.approx(0.0000886, abs=1e-6)
    for spend in Spend:
        assert spent(0.05, 1.0, spend) == 0.05
        assert 0.0 < spent(0.01, 0.6, spend) < spent(0.02, 0.6, spend) < spent(0.02, 0.8, spend) < 0.02


@settings(max_examples=25)
@given(
    diffs=st.lists(VALUES, min_size=6, max_size=17),
    n_max=st.sampled_from([10, 17]),
    alpha=st.sampled_from([0.05, 0.025, 0.2]),
    spend=st.sampled_from(list(Spend)),
)
def test_interval_and_p_agree(diffs: list[float], n_max: int, alpha: float, spend: Spend) -> None:
    looks = [n for n in (6, 8, 10, 13, 17) if n <= n_max]
    test = after(diffs[:n_max], looks, n_max, spend, drawn=199)
    low, high = test.interval(1.0 - alpha)
    mean = float(np.mean(diffs[:n_max]))
    assert low <= mean <= high
    assert (low > 0.0 or high < 0.0) == (test.p <= alpha)
    assert test.smallest_p <= test.p + 1e-6


@settings(max_examples=20)
@given(diffs=st.lists(VALUES, min_size=17, max_size=17), n_max=st.sampled_from([12, 17]))
def test_a_decision_is_never_taken_back(diffs: list[float], n_max: int) -> None:
    looks = [n for n in (6, 8, 10, 12, 17) if n <= n_max]
    p_values = [after(diffs[:n], looks, n_max).p for n in looks]
    assert p_values == sorted(p_values, reverse=True)
    decided = [after(diffs[:n], looks, n_max).rejected_at(0.05) for n in looks]
    first = next((look for look in decided if look is not None), None)
    assert all(look == first for look in decided[first:] if first is not None)


def test_over_all_patterns_no_more_than_alpha_is_rejected() -> None:
    """Exact: of the 2^8 equally likely outcomes at most 5 % are ever called a difference."""
    sizes_N = np.array([0.3, 1.0, 1.1, 2.0, 0.7, 0.2, 1.7, 0.9])
    outcomes = [np.array(signs) * sizes_N for signs in product((1.0, -1.0), repeat=8)]
    for spend in Spend:
        found = [after(diffs_N, [6, 7, 8], 8, spend).rejected_at(0.05) is not None for diffs_N in outcomes]
        assert 0.02 <= np.mean(found) <= 0.05


def test_before_a_look_nothing_is_known() -> None:
    test = after([1.0, 2.0, 3.0], [6, 8], 8)
    assert (test.p, test.smallest_p, test.interval(0.95)) == (1.0, 1.0, (-math.inf, math.inf))


def test_lost_seeds_leave_the_spending_as_planned() -> None:
    whole = after(np.arange(1.0, 9.0), [6, 8], 8)
    fewer = SequentialFlip(
        diffs_N=np.arange(1.0, 7.0), counts_K=[4, 6], shares_K=[6 / 8, 1.0], n_max=8, spend=Spend.POCOCK
    )
    assert whole.rejected_at(0.05) == 0  # all of one sign: 2 / 2^6 is spent by then
    assert fewer.rejected_at(0.05) == 1  # with four differences nothing can be


@pytest.mark.parametrize(
    "wrong",
    [
        {"counts_K": [6], "shares_K": [0.5, 1.0]},
        {"counts_K": [9], "shares_K": [1.0]},
        {"counts_K": [6, 4], "shares_K": [0.5, 1.0]},
        {"diffs_N": np.array([1.0] * 7 + [math.nan])},
    ],
)
def test_refuses_what_cannot_be(wrong: dict[str, object]) -> None:
    given = {"diffs_N": np.ones(8), "counts_K": [8], "shares_K": [1.0], "n_max": 8, "spend": Spend.POCOCK} | wrong
    with pytest.raises(ValueError):  # noqa: PT011 - one of two, both of numbers
        SequentialFlip(**given)  # type: ignore[arg-type]


def test_the_anytime_test_agrees_with_its_description() -> None:
    diffs_N = np.random.default_rng(5).normal(0.7, 1.0, 20)
    evidence, products = [], np.ones(8)
    for n in range(1, 21):
        x = diffs_N[n - 1] / math.sqrt(np.mean(diffs_N[:n] ** 2))
        products *= [2 / (1 + math.exp(-2 * bet * x)) for bet in (0.4, 0.8, 1.6, 3.2, -0.4, -0.8, -1.6, -3.2)]
        evidence.append(products.mean())
    assert running_evidence(diffs_N) == pytest.approx(evidence, rel=1e-12)
    assert AnytimeTest(diffs_N=diffs_N).p == pytest.approx(1 / max(evidence))


def test_seven_equal_differences_suffice() -> None:
    assert running_evidence(np.full(7, 0.1))[-1] == pytest.approx(33.5, abs=0.05)
    assert [AnytimeTest(diffs_N=np.full(n, 3.0)).p <= 0.05 for n in (6, 7)] == [False, True]


@settings(max_examples=20)
@given(sizes=st.lists(st.floats(0.0, 1e3, width=32), min_size=1, max_size=7))
def test_its_mean_over_all_signs_is_one(sizes: list[float]) -> None:
    ends = [running_evidence(np.array(signs) * np.array(sizes))[-1] for signs in product((1, -1), repeat=len(sizes))]
    assert np.mean(ends) == pytest.approx(1.0, rel=1e-9)


@settings(max_examples=30)
@given(diffs=st.lists(VALUES, min_size=1, max_size=20), alpha=st.sampled_from([0.05, 0.0125, 0.3]))
def test_anytime_interval_and_p_agree(diffs: list[float], alpha: float) -> None:
    test = AnytimeTest(diffs_N=np.array(diffs))
    low, high = test.interval(1.0 - alpha)
    assert low <= np.mean(diffs) <= high
    assert (low > 0.0 or high < 0.0) == (test.p <= alpha)
    assert test.smallest_p <= test.p * (1 + 1e-9)


@settings(max_examples=25)
@given(diffs=st.lists(VALUES, min_size=2, max_size=12), scale=st.sampled_from([1e-200, 1e-3, 1e150]))
def test_the_unit_does_not_matter(diffs: list[float], scale: float) -> None:
    assert running_evidence(np.array(diffs) * scale) == pytest.approx(running_evidence(np.array(diffs)), rel=1e-9)


def test_more_seeds_never_raise_p_and_few_give_no_limit() -> None:
    diffs_N = np.random.default_rng(2).normal(1.0, 1.0, 16)
    p_values = [AnytimeTest(diffs_N=diffs_N[:n]).p for n in range(1, 17)]
    assert p_values == sorted(p_values, reverse=True)
    assert AnytimeTest(diffs_N=diffs_N[:4]).interval(0.95) == (-math.inf, math.inf)
    assert math.isinf(AnytimeTest(diffs_N=np.array([])).interval(0.95)[0])
    with pytest.raises(ValueError, match="not finite"):
        running_evidence(np.array([1.0, math.inf]))
