"""Crossed random effects of seeds and examples: against an independent implementation, with clusters, at the edges."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t

from retrain.verdicts.stats.crossed import crossed


def _textbook(diffs_NE: np.ndarray, level: float) -> dict[str, tuple[float, float, float]]:
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


@settings(max_examples=25, deadline=None)
@given(n=st.integers(2, 9), m=st.integers(2, 20), seed=st.integers(0, 2**32), level=st.sampled_from([0.8, 0.95, 0.99]))
def test_the_three_scopes_are_those_of_the_textbook(n: int, m: int, seed: int, level: float) -> None:
    rng = np.random.default_rng(seed)
    diffs_NE = rng.normal(0.1, 1, (n, 1)) + rng.normal(0, 2, (1, m)) + rng.normal(0, 1, (n, m))
    result, expected = crossed(diffs_NE, level=level), _textbook(diffs_NE, level)
    for name in ("both", "seeds", "examples"):
        found = getattr(result, name)
        assert (*found.interval, found.p) == pytest.approx(expected[name], rel=1e-10, abs=1e-12)


def test_clusters_of_one_size_are_their_means() -> None:
    diffs_NE = np.random.default_rng(1).normal(size=(6, 24))
    means_NC = diffs_NE.reshape(6, 8, 3).mean(axis=2)
    clustered = crossed(diffs_NE, clusters_E=[str(e // 3) for e in range(24)])
    plain = crossed(means_NC)
    for name in ("both", "seeds", "examples"):
        assert getattr(clustered, name).interval == pytest.approx(getattr(plain, name).interval, abs=1e-13)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32), names=st.lists(st.sampled_from("abcdef"), min_size=12, max_size=12))
def test_unequal_clusters_leave_the_mean_and_the_seeds_alone(seed: int, names: list[str]) -> None:
    diffs_NE = np.random.default_rng(seed).normal(size=(5, 12))
    clustered, plain = crossed(diffs_NE, clusters_E=names), crossed(diffs_NE)
    assert clustered.mean == pytest.approx(diffs_NE.mean(), abs=1e-14)
    assert clustered.seeds is not None
    assert plain.seeds is not None
    assert clustered.seeds.interval == pytest.approx(plain.seeds.interval, abs=1e-12)
    assert clustered.squares.num_clusters == len(set(names))
    if clustered.examples:
        assert 1.0 <= clustered.examples.df <= len(set(names)) - 1.0 + 1e-9


def test_examples_of_one_source_tell_no_more_than_one_of_them() -> None:
    means_NC = np.random.default_rng(2).normal(size=(8, 10))
    copies_NE = np.repeat(means_NC, 6, axis=1)
    honest = crossed(copies_NE, clusters_E=[str(e // 6) for e in range(60)])
    fooled, alone = crossed(copies_NE), crossed(means_NC)
    assert honest.both is not None
    assert fooled.both is not None
    assert alone.both is not None
    assert honest.both.interval == pytest.approx(alone.both.interval, abs=1e-12)
    assert np.diff(fooled.both.interval)[0] < 0.9 * np.diff(alone.both.interval)[0]


def test_what_cannot_be_inferred_is_none() -> None:
    one_seed, one_example = crossed(np.array([[0.1, 0.2, 0.4]])), crossed(np.array([[0.1], [0.2], [0.4]]))
    assert one_seed.both is None
    assert one_seed.seeds is None
    assert one_seed.examples is not None
    assert one_example.both is None
    assert one_example.examples is None
    assert one_example.seeds is not None
    one_cluster = crossed(np.array([[0.1, 0.2], [0.3, 0.1]]), clusters_E=["a", "a"])
    assert one_cluster.both is None
    assert one_cluster.examples is None
    assert one_cluster.seeds is not None
    equal = crossed(np.full((4, 5), 0.1))  # 0.1 has no exact mean: rounding must not become a spread
    assert (equal.both, equal.seeds, equal.examples) == (None, None, None)


@pytest.mark.parametrize("bad", [np.zeros(3), np.zeros((0, 3)), np.array([[0.0, np.nan]]), np.array([[np.inf, 0.0]])])
def test_what_is_no_full_matrix_of_numbers_is_refused(bad: np.ndarray) -> None:
    with pytest.raises(ValueError, match="seed"):
        crossed(bad)


def test_every_example_needs_a_cluster() -> None:
    with pytest.raises(ValueError, match="1 clusters for 2 examples"):
        crossed(np.zeros((2, 2)), clusters_E=["a"])
