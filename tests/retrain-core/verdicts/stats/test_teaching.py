"""The chance that a group teaches: exact, drifting, pooled over prompts."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
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
    for wrong in ({"decay": 0.0}, {"decay": 1.1}, {"prior": (0.0, 1.0)}, {"prior_weight": float("nan")}):
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
