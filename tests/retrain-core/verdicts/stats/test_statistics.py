"""Tests, intervals and power against scipy called directly, and against simulated studies."""

from __future__ import annotations

import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats

from retrain.records.runs.curves import Direction, parse_metric
from retrain.records.runs.source import find_runs
from retrain.verdicts.stats import paired as power
from retrain.verdicts.stats.flip import FlipTest, patterns_for
from retrain.verdicts.study.comparison import Comparison, Verdict, VerdictReason
from retrain.verdicts.study.judge import Pairing, holm, judge, levels
from retrain.verdicts.study.study import Options, Study, study_of
from tests.kit.shared import slow_or_long

ALPHA = 0.05


def mean(x: Any, axis: int = -1) -> Any:
    return x.mean(axis=axis)


def scipy_p(diffs_N: np.ndarray) -> float:
    options: dict[str, Any] = {"permutation_type": "samples", "vectorized": True, "n_resamples": 9_999}
    return float(stats.permutation_test((diffs_N,), mean, **options, rng=np.random.default_rng(5)).pvalue)


def pairing(diffs: Any, label: str = "b") -> Pairing:
    diffs_N = np.asarray(diffs, dtype=float)
    zeros_N = np.zeros(diffs_N.size)
    return Pairing(
        baseline="a", condition=label, seeds=tuple(range(diffs_N.size)), baseline_N=zeros_N, condition_N=diffs_N
    )


def judged(*diffs: Any, alpha: float = ALPHA, direction: Direction = Direction.HIGHER) -> tuple[Comparison, ...]:
    return judge([pairing(each, f"c{i}") for i, each in enumerate(diffs)], alpha=alpha, direction=direction)


def scipy_power(num_seeds: int, d: float, alpha: float) -> float:
    critical, shift = stats.t.ppf(1 - alpha / 2, num_seeds - 1), d * math.sqrt(num_seeds)
    below = stats.nct.cdf(-critical, num_seeds - 1, shift)  # NaN far out, where it is nothing
    return float(stats.nct.sf(critical, num_seeds - 1, shift) + np.nan_to_num(below))


@pytest.fixture(scope="module")
def studies(made: Any, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, Study]]:
    """Fifty random campaigns: 2 to 4 conditions, 2 to 12 seeds and once in five 13 to 16, 4 steps."""
    rng, found = np.random.default_rng(1), []
    for index in range(50):
        folder = tmp_path_factory.mktemp("campaign")
        effects = {f"grpo+c{i}": 0.1 * rng.standard_normal() for i in range(rng.integers(2, 5))}
        num_seeds = int(rng.integers(13, 17) if index % 5 == 0 else rng.integers(2, 13))
        made.write_campaign(folder, effects, seeds=range(num_seeds), steps=4, spread=0.1, eval_every=2)
        found.append((folder, study_of(find_runs([folder]), Options())))
    return found


@pytest.mark.long
def test_the_numbers_of_fifty_random_campaigns_are_scipys(studies: list[tuple[Path, Study]]) -> None:
    for _, study in studies:
        first = study.conditions[0].estimates[str(study.metric)].values
        p_M = []
        for condition, found in zip(study.conditions[1:], study.comparisons, strict=True):
            values = condition.estimates[str(study.metric)].values
            a_N, b_N = np.array(list(first.values())), np.array(list(values.values()))
            diffs_N = b_N - a_N
            p_M.append(scipy_p(diffs_N))
            assert found.p is not None
            assert found.p == pytest.approx(p_M[-1], abs=1e-9 if diffs_N.size <= 13 else 0.02)
            assert found.difference == pytest.approx(stats.ttest_rel(b_N, a_N).statistic * stats.sem(diffs_N))
            assert found.d_z == pytest.approx(diffs_N.mean() / diffs_N.std(ddof=1))
            assert found.d_pooled == pytest.approx(diffs_N.mean() / math.sqrt((a_N.var(ddof=1) + b_N.var(ddof=1)) / 2))
            check_power(found, len(study.comparisons))
        assert [each.p_holm for each in study.comparisons] == pytest.approx(
            holm([each.p or 0.0 for each in study.comparisons])
        )


def check_power(found: Comparison, comparisons: int) -> None:
    alpha, num_seeds = ALPHA / comparisons, len(found.seeds)
    if found.detectable is not None and found.d_z and found.difference:
        detectable_d = found.detectable / (found.difference / found.d_z)
        chance = power.power_of(num_seeds, detectable_d, alpha)
        assert chance == pytest.approx(0.8, abs=1e-4)
        assert scipy_power(num_seeds, detectable_d, alpha) >= chance - 1e-9
    needed = power.seeds_needed(found.d_z, alpha) if found.d_z else None
    if needed is not None and needed > 12 and found.d_z:
        assert scipy_power(needed, abs(found.d_z), alpha) >= 0.8
        assert scipy_power(needed - 1, abs(found.d_z), alpha) < 0.8 or needed == 13


@pytest.mark.long
def test_the_intervals_of_conditions_hold_students_and_the_exact_ones(studies: list[tuple[Path, Study]]) -> None:
    for _, study in studies[:20]:
        for condition in study.conditions:
            for name, estimate in condition.estimates.items():
                values_N = np.array(list(estimate.values.values()))
                assert estimate.mean == pytest.approx(values_N.mean())
                if np.ptp(values_N) == 0:
                    continue
                by_t = stats.t.interval(0.95, values_N.size - 1, values_N.mean(), stats.sem(values_N))
                metric = parse_metric(name, where="test")
                if not metric.is_eval:
                    assert estimate.interval == pytest.approx(tuple(np.clip(by_t, 0.0, 1.0)))
                    continue
                right = values_N.mean() * 64  # the examples of made-up runs
                low = stats.binomtest(math.floor(right + 1e-9), 64).proportion_ci(method="exact").low
                high = stats.binomtest(math.ceil(right - 1e-9), 64).proportion_ci(method="exact").high
                below = math.hypot(values_N.mean() - by_t[0], values_N.mean() - low)
                above = math.hypot(values_N.mean() - by_t[1], values_N.mean() - high)
                want = np.clip((values_N.mean() - below, values_N.mean() + above), 0.0, 1.0)
                assert estimate.interval == pytest.approx(tuple(want))


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_is_its_definition(p_M: list[float]) -> None:
    adjusted = holm(p_M)
    for alpha in (0.01, 0.05, 0.2, 0.5):
        rejected = set()
        for rank, index in enumerate(sorted(range(len(p_M)), key=lambda i: p_M[i])):
            if (len(p_M) - rank) * p_M[index] > alpha:
                break
            rejected.add(index)
        assert {i for i, p in enumerate(adjusted) if p <= alpha} == rejected
    assert all(p <= q <= 1.0 for p, q in zip(p_M, adjusted, strict=True))


def test_three_seeds_cannot_tell_whatever_they_show() -> None:
    [found] = judged([10.0, 11.0, 12.0])
    assert (found.verdict, found.cause) == (Verdict.CANNOT_TELL, VerdictReason.TOO_FEW)
    assert (found.p, found.smallest_p, found.least_seeds, found.detectable) == (0.25, 0.25, 6, None)
    [five], [six] = judged([10.0, 11, 12, 13, 14]), judged([10.0, 11, 12, 13, 14, 15])
    assert (five.verdict, five.p) == (Verdict.CANNOT_TELL, 0.0625)
    assert (six.verdict, six.p) == (Verdict.BETTER, 0.03125)


def test_four_comparisons_need_eight_seeds() -> None:
    clear = np.arange(10.0, 17.0)
    assert {each.cause for each in judged(*[clear] * 4)} == {VerdictReason.TOO_FEW}
    assert {each.least_seeds for each in judged(*[clear] * 4)} == {8}
    assert {each.verdict for each in judged(*[np.arange(10.0, 18.0)] * 4)} == {Verdict.BETTER}


def test_a_comparison_that_could_not_be_tested_still_counts() -> None:
    clear = np.arange(10.0, 16.0)
    found, empty, single = judged(clear, [], [1.0])
    assert (found.p_holm, found.verdict, found.cause) == (0.03125 * 3, Verdict.CANNOT_TELL, VerdictReason.TOO_FEW)
    for none in (empty, single):
        assert (none.p, none.p_holm, none.interval, none.d_z, none.verdict) == (None,) * 4 + (Verdict.CANNOT_TELL,)
    assert (empty.difference, single.difference) == (None, 1.0)


def test_directions() -> None:
    up, down = np.arange(10.0, 18.0), -np.arange(10.0, 18.0)
    assert [each.verdict for each in judged(up, down)] == [Verdict.BETTER, Verdict.WORSE]
    assert [each.verdict for each in judged(up, down, direction=Direction.LOWER)] == [Verdict.WORSE, Verdict.BETTER]


def test_equal_runs_and_equal_differences() -> None:
    same, shifted = judged(np.zeros(8), np.full(8, 0.25))
    assert (same.p, same.verdict, same.interval) == (1.0, Verdict.CANNOT_TELL, (0.0, 0.0))
    assert (same.d_z, same.smallest_p) == (None, 1.0)
    assert (shifted.verdict, shifted.interval, shifted.d_z) == (Verdict.BETTER, (0.25, 0.25), None)


@example(scale=140596.48828035058, diffs=[-2, -17, -7, -20, -17, -12, 16, -17, -8])
@given(
    scale=st.floats(1e-6, 1e6),
    diffs=st.lists(st.integers(-20, 20), min_size=6, max_size=10).filter(lambda d: len(set(d)) > 1),
)
def test_units_do_not_matter(scale: float, diffs: list[int]) -> None:
    [one], [other] = judged(diffs), judged(np.array(diffs) * scale)
    assert (one.p, one.verdict) == (other.p, other.verdict)


def test_power_is_scipys_but_at_the_fewest_seeds() -> None:
    for num_seeds, d, alpha in product((8, 10, 20, 100), (0.2, 0.5, 1.0), (0.05,)):
        assert power.power_of(num_seeds, d, alpha) == pytest.approx(scipy_power(num_seeds, d, alpha))
    assert power.power_of(6, 1.5, 0.05) == pytest.approx(float(stats.norm.cdf(1.5) ** 6), abs=1e-6)
    assert power.power_of(5, 10.0, 0.05) == 0.0
    assert power.power_of(50, 100.0, 0.05) == 1.0
    assert [power.least_seeds(alpha) for alpha in (0.05, 0.05 / 4, 0.05 / 3, 0.5)] == [6, 8, 7, 2]


@pytest.mark.parametrize(("d", "needed"), [(0.5, 34), (0.8, 15), (1.0, 10), (0.0, None), (0.02, None)])
def test_seeds_needed(d: float, needed: int | None) -> None:
    assert power.seeds_needed(d, 0.05) == power.seeds_needed(-d, 0.05) == needed


@pytest.mark.parametrize("num_seeds", slow_or_long([6, 7, 8, 12], 6))
def test_without_an_effect_at_most_five_in_a_hundred_campaigns_hold_a_verdict(num_seeds: int) -> None:
    """Five conditions of one distribution, a shared baseline, 1,000 campaigns."""
    rng, false = np.random.default_rng(num_seeds), 0
    for _ in range(1000):
        base_N, *others = rng.standard_normal((5, num_seeds))
        false += has_verdict([other - base_N for other in others])
    assert false / 1000 <= 0.05


def test_without_an_effect_single_comparisons_hold_as_well() -> None:
    rng = np.random.default_rng(7)
    false = sum(has_verdict([rng.standard_normal(8) - rng.standard_normal(8)]) for _ in range(4000))
    # By counting, 12 of the 256 sign patterns lead to a verdict: 4.7 %, here within two standard errors of it.
    assert abs(false / 4000 - 12 / 256) <= 0.007


@pytest.mark.slow
@pytest.mark.parametrize("d", [1.0, 1.2])
def test_a_true_effect_is_found_in_eighty_of_a_hundred_studies_of_the_computed_size(d: float) -> None:
    assert 0.76 <= detection(d, others=0) <= 0.84


@pytest.mark.slow
def test_where_few_seeds_are_coarse_more_than_eighty_are_found() -> None:
    assert power.seeds_needed(1.5, ALPHA) == 7  # six find 67 %, a t-test would ask for six
    assert detection(1.5, others=0) >= 0.76


@pytest.mark.long
def test_a_true_effect_is_found_among_others_without() -> None:
    assert 0.76 <= detection(1.0, others=3, studies=400) <= 0.84


def detection(d: float, *, others: int, studies: int = 1000) -> float:
    num_seeds = power.seeds_needed(d, ALPHA / (1 + others))
    assert num_seeds is not None
    rng = np.random.default_rng(3)
    found = 0
    for _ in range(studies):
        diffs = [rng.normal(d, 1.0, num_seeds), *rng.standard_normal((others, num_seeds))]
        found += has_verdict(diffs, of=0, verdict=Verdict.BETTER)
    return found / studies


def has_verdict(diffs: list[np.ndarray], *, of: int | None = None, verdict: Verdict | None = None) -> bool:
    """Whether any comparison (or that one) has a verdict; the whole judgement is made only where p allows one."""
    p_M = holm([FlipTest.of(each).p for each in diffs]) if of is None else [FlipTest.of(diffs[of]).p]
    if min(p_M) > ALPHA:
        return False
    verdicts = [each.verdict for each in judged(*diffs)]
    if of is not None:
        return verdicts[of] is verdict
    return any(each is not Verdict.CANNOT_TELL for each in verdicts)


def test_drawn_patterns_are_enough_for_many_comparisons() -> None:
    assert patterns_for(4, 0.05) == 10_000
    for comparisons in (100, 500):
        test = FlipTest.of(np.arange(1.0, 17.0), patterns=patterns_for(comparisons, 0.05))
        assert comparisons * test.smallest_p <= 0.05 / 2


def test_the_same_comparison_twice_is_the_same(made: Any, tmp_path: Path) -> None:
    folder = made.write_campaign(tmp_path / "c", {"grpo+none": 0.0, "maxrl+none": 0.1}, seeds=range(14), steps=3)
    assert study_of(find_runs([folder]), Options()).comparisons == study_of(find_runs([folder]), Options()).comparisons


FAMILIES = st.lists(
    st.tuples(st.integers(0, 12), st.sampled_from([0.0, 0.0, 0.5, 1.0, 3.0]), st.integers(0, 2**16)),
    min_size=1,
    max_size=20,
)


@settings(max_examples=60)
@given(family=FAMILIES, alpha=st.sampled_from([0.05, 0.1, 0.01, 0.25]))
def test_an_interval_leaves_out_zero_exactly_where_its_verdict_is_found(
    family: list[tuple[int, float, int]], alpha: float
) -> None:
    diffs = [np.random.default_rng(key).normal(effect, 1.0, size).round(1) for size, effect, key in family]
    for found in judged(*diffs, alpha=alpha):
        low, high = found.interval or (-math.inf, math.inf)
        assert (found.cause is VerdictReason.FOUND) == (low > 0.0 or high < 0.0)
        assert (found.verdict is Verdict.BETTER) == (low > 0.0)
        assert (found.verdict is Verdict.WORSE) == (high < 0.0)
        assert 1.0 - alpha - 1e-12 <= found.level <= 1.0 - alpha / len(diffs) + 1e-12


@pytest.mark.parametrize(
    ("p_M", "shares"),
    [
        ([0.001, 0.5, 0.012], [3, 1, 2]),  # two found, the third fails at the last step
        ([0.5, 0.03, 0.2], [3, 3, 3]),  # none found: all fail at the first step
        ([0.5, 0.001, 0.2], [2, 3, 2]),
        ([0.01, 0.01, 0.01], [3, 2, 1]),
        ([0.05], [1]),
    ],
)
def test_levels_are_those_of_holms_steps(p_M: list[float], shares: list[int]) -> None:
    assert levels(p_M, alpha=0.05) == pytest.approx([1.0 - 0.05 / share for share in shares])
