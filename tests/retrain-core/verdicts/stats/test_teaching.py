"""The chance that a group teaches: exact, drifting, pooled over prompts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit
from scipy.stats import beta as beta_distribution

from retrain.verdicts.stats.teaching import Calibration, RateBook, TeachingForecast, calibration, teaching

GROUP = 8


def test_evidence_moves_the_chance_and_fades_to_the_population_at_present():
    book = RateBook()
    for step in range(3):
        for example, correct in (("never", 0), ("always", GROUP), ("half", GROUP // 2)):
            book.observe(example, step, correct, GROUP)
    at_once = {each: book.chances([each], 3, GROUP)[0] for each in ("never", "always", "half", "unseen")}
    assert max(at_once["never"], at_once["always"]) < 0.1 < at_once["unseen"] < 0.9 < at_once["half"]
    assert book.rate("half", 3) == pytest.approx(book.rate("half", 3)[::-1], rel=0.05)  # as often right as wrong
    later = {each: book.chances([each], 600, GROUP)[0] for each in at_once}
    assert later == pytest.approx(dict.fromkeys(later, later["unseen"]), abs=1e-3)
    # Two thirds of the prompts teach nothing, then all do.
    book = RateBook(settings=TeachingForecast(decay=0.8))
    for number in range(30):
        book.observe(str(number), 0, (0, GROUP, GROUP // 2)[number % 3], GROUP)
    assert book.chances(["unseen"], 1, GROUP)[0] == pytest.approx(1 / 3, abs=0.12)
    for number in range(30):
        book.observe(str(number), 20, GROUP // 2, GROUP)
    assert book.chances(["unseen"], 21, GROUP)[0] > 0.9


def described(history, step, *, decay, prior, weight):
    """Drift, posteriors at a step and the population, straight from the description: nothing is summed as it comes."""
    odds_K, drift, variance, seen = np.linspace(-7, 7, 29), 0.0, 0.1**2, {}
    rates_K = expit(odds_K)

    def mean_step(each, now):
        weights = [decay ** (now - at) * (right + wrong) for at, right, wrong in seen[each]]
        return np.average([at for at, _, _ in seen[each]], weights=weights)

    def posteriors(now):
        likelihood = {}
        for each, trials in seen.items():
            q_K = expit(odds_K - drift * (now - mean_step(each, now)))
            q_K[[0, -1]] = rates_K[[0, -1]]
            kept = [(decay ** (now - at), right, wrong) for at, right, wrong in trials]
            likelihood[each] = np.prod([(q_K**right * (1 - q_K) ** wrong) ** k for k, right, wrong in kept], axis=0)
        guess_K = beta_distribution(*prior).pdf(rates_K) * rates_K * (1 - rates_K)
        guess_K *= weight / guess_K.sum()
        population_K = guess_K / guess_K.sum()
        for _ in range(40 if seen else 0):
            shares = [population_K * each_K / (population_K @ each_K) for each_K in likelihood.values()]
            population_K = (guess_K + sum(shares)) / (weight + len(seen))
        found = {each: population_K * each_K / (population_K @ each_K) for each, each_K in likelihood.items()}
        return found, population_K

    for now, groups in history:
        found, _ = posteriors(now)
        variance += 0.01**2 if seen else 0.0
        for each, right, judged in groups:
            if each in seen:
                mean, square = found[each] @ rates_K, found[each] @ rates_K**2
                slope = judged * (mean - square) * (now - mean_step(each, now))
                noise = judged * mean * (1 - mean) + judged * (judged - 1) * (square - mean**2)
                gain = variance * slope / (variance * slope**2 + noise)
                drift, variance = drift + gain * (right - judged * mean), variance * (1 - gain * slope)
        for each, right, judged in groups:
            seen.setdefault(each, []).append((now, right, judged - right))
    return drift, *posteriors(step), rates_K


def test_rates_are_those_of_the_description():
    history = [(0, [("a", 2, 8), ("b", 8, 8)]), (2, [("a", 3, 6), ("c", 0, 8)]), (3, [("a", 5, 8), ("c", 1, 4)])]
    book = RateBook(settings=TeachingForecast(decay=0.9, prior=(0.4, 0.7), prior_weight=3.0))
    for step, groups in history:
        for example, correct, judged in groups:
            book.observe(example, step, correct, judged)
    drift, found, population_K, rates_K = described(history, 6, decay=0.9, prior=(0.4, 0.7), weight=3.0)
    assert book.population(6) == pytest.approx(population_K, rel=1e-9)
    assert book.drift == pytest.approx(drift, rel=1e-9)
    for name in "abc":
        chances = np.array([found[name], population_K]) @ (1 - rates_K**4 - (1 - rates_K) ** 4)
        assert book.chances([name, "unseen"], 6, 4) == pytest.approx(chances, rel=1e-9)
        beta = beta_distribution(*book.rate(name, 6))
        mean = found[name] @ rates_K
        assert (beta.mean(), beta.var()) == pytest.approx((mean, found[name] @ (rates_K - mean) ** 2), rel=1e-9)
    cells_N = np.searchsorted(np.cumsum(found["a"]), np.random.default_rng(1).random(50))
    assert book.draw(["a"] * 50, 6, np.random.default_rng(1)) == pytest.approx(rates_K[cells_N])
    assert teaching(np.array([0.0, 0.5, 1.0]), 1).tolist() == [0.0, 0.0, 0.0]
    drift, _, population_K, _ = described([], 0, decay=0.98, prior=(0.3, 0.3), weight=2.0)
    assert (RateBook().drift, RateBook().population(0)) == (drift, pytest.approx(population_K))


def test_the_moments_of_the_beta_distribution_are_those_of_the_posterior():
    book = RateBook()
    for number in range(40):
        book.observe(str(number), number, number % (GROUP + 1), GROUP)
    drawn_N = book.draw(["4"] * 4000, 41, np.random.default_rng(0))
    alpha, beta = book.rate("4", 41)
    assert drawn_N.mean() == pytest.approx(alpha / (alpha + beta), abs=0.01)
    assert drawn_N.var() == pytest.approx(beta_distribution(alpha, beta).var(), rel=0.1)
    assert teaching(drawn_N, GROUP).mean() == pytest.approx(book.chances(["4"], 41, GROUP)[0], abs=0.02)


groups = st.lists(st.tuples(st.sampled_from("abcd"), st.integers(0, GROUP), st.booleans()), max_size=30)


@settings(max_examples=25)
@given(groups, st.integers(0, 30))
def test_a_restored_book_continues_exactly(seen, cut):
    whole, part = RateBook(), RateBook()
    for step, (example, correct, is_judged) in enumerate(seen):
        if step == cut:
            part, old = RateBook(), part
            part.restore(json.loads(json.dumps(old.state())))
        for book in (whole, part):
            book.chances([example], step, GROUP)
            book.observe(example, step, correct if is_judged else 0, GROUP if is_judged else 0)
    every = [*"abcd", "unseen"]
    expected_N = whole.chances(every, len(seen), GROUP)
    assert np.array_equal(part.chances(every, len(seen), GROUP), expected_N)
    assert ((expected_N >= 0.0) & (expected_N <= 1.0)).all()


def test_a_forecast_knows_nothing_of_its_own_step_and_leaves_no_trace():
    """Steps may be asked for before those in between are counted, as they are when sampling runs ahead."""
    asked, silent = RateBook(), RateBook()
    for step in range(6):
        before = asked.chances(["a"], step, GROUP)[0]
        for book in (asked, silent):
            book.observe("a", step, GROUP // 2, GROUP)
        assert asked.chances(["a"], step, GROUP)[0] == before
        asked.chances(["a"], step + 3, GROUP)
    assert asked.chances(["a"], 6, GROUP)[0] == silent.chances(["a"], 6, GROUP)[0]


def test_the_drift_of_the_log_odds_is_followed():
    rng, book = np.random.default_rng(0), RateBook()
    for step in range(60):
        rate = 1.0 / (1.0 + np.exp(3.0 - 0.1 * step))
        for each in range(8):
            book.observe(f"learnt {each}", step, int(rng.binomial(GROUP, rate)), GROUP)
            book.observe(f"never {each}", step, 0, GROUP)
    book.chances(["unseen"], 60, GROUP)[0]
    assert book.drift == pytest.approx(0.1, abs=0.03)
    assert book.chances(["never 0"], 60, GROUP)[0] < 0.1


def test_odd_counts_are_refused_and_calibration_counts_every_forecast_once():
    book = RateBook()
    for correct, judged in ((-1, 2), (3, 2)):
        with pytest.raises(ValueError, match="completions"):
            book.observe("a", 0, correct, judged)
    book.observe("a", 5, 1, 2)
    with pytest.raises(ValueError, match="step 5"):
        book.chances(["a"], 4, GROUP)[0]
    priors = ({"prior": (0.0, 1.0)}, {"prior": (0.0, np.inf)}, {"prior": (1.0, np.inf)})
    for wrong in ({"decay": 0.0}, {"decay": 1.1}, *priors, {"prior_weight": float("nan")}):
        with pytest.raises(ValueError, match="TeachingForecast"):
            TeachingForecast(**wrong)
    found = calibration([0.1] * 10 + [0.9] * 10, [False] * 9 + [True] + [True] * 8 + [False] * 2, bins=2)
    assert np.array(found.bins) == pytest.approx(np.array([[0.1, 0.1, 10], [0.9, 0.8, 10]]))
    assert found.error == pytest.approx(0.05)
    assert calibration([], []) is None
    assert calibration([0.25], [True]) == Calibration(bins=((0.25, 1.0, 1),), error=0.75)
    for forecasts, outcomes in (([1.5], [True]), ([float("nan")], [True]), ([0.5], [])):
        with pytest.raises(ValueError, match="forecast"):
            calibration(forecasts, outcomes)
