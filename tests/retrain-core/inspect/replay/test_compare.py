"""Cosine, its parts by group and its spread over resampled groups, from gradients whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.inspect.replay.gradients import FOLDED, Folding, StepGradient, Turn, inner, interval, largest, turn_of
from retrain.kernel.seeding import Seeds
from retrain.kernel.types import Floats

SEEDS = Seeds(3)


def gradient(shares_PN: Floats) -> StepGradient:
    """A step whose groups have these shares; a group of zeros has none, like one that is not trained."""
    shares = {group: share_N for group, share_N in enumerate(shares_PN) if share_N.any()}
    return StepGradient(whole_N=shares_PN.sum(0).astype(np.float32), loss=0.0, clipped=0, shares=shares)


def turn(taken_PN: Floats, other_PN: Floats, resamples: int = 200) -> Turn:
    given = {"seeds": SEEDS, "step": 0, "groups": len(taken_PN), "resamples": resamples}
    return turn_of(gradient(taken_PN), gradient(other_PN), **given)  # type: ignore[arg-type]


@given(st.integers(0, 2**32), st.integers(1, 6))
def test_the_parts_of_the_groups_add_up_to_the_turn(seed: int, groups: int) -> None:
    stream = np.random.default_rng(seed)
    taken_PN, other_PN = stream.normal(size=(2, groups, 9))
    taken_PN[0], other_PN[-1] = 0.0, (0.0 if groups > 1 else other_PN[-1])
    found = turn(taken_PN, other_PN, resamples=0)
    if found.cosine is None:
        assert groups == 1
        return
    a_N, b_N = taken_PN.sum(0), other_PN.sum(0)
    assert found.cosine == pytest.approx(a_N @ b_N / np.linalg.norm(a_N) / np.linalg.norm(b_N), abs=1e-5)
    assert sum(found.parts.values()) == pytest.approx(1.0 - found.cosine, abs=1e-5)
    assert found.norm_ratio == pytest.approx(np.linalg.norm(b_N) / np.linalg.norm(a_N), rel=1e-5)


def test_a_scaled_gradient_does_not_turn() -> None:
    taken_PN = np.random.default_rng(0).normal(size=(4, 30))
    found = turn(taken_PN, 3.0 * taken_PN)
    assert (found.cosine, found.norm_ratio) == (pytest.approx(1.0), pytest.approx(3.0))
    assert (found.low, found.high) == (pytest.approx(1.0), pytest.approx(1.0))
    assert not found.turns
    assert found.parts == {}


def test_the_one_group_that_turned_is_named() -> None:
    taken_PN = np.zeros((3, 3)) + np.eye(3)
    other_PN = taken_PN * [[1.0], [-1.0], [1.0]]
    found = turn(taken_PN, other_PN)
    assert found.cosine == pytest.approx(1 / 3)
    assert largest(found.parts, 5) == [(1, pytest.approx(2 / 3))]
    assert (found.low or 0.0) < found.cosine < (found.high or 0.0)


def test_resamples_without_a_direction_give_no_interval() -> None:
    one_PP = np.diag([1.0, 0.0, 0.0])  # one group of three has a gradient: (2/3)^3 = 30 % of the draws have none
    assert interval(one_PP, one_PP, one_PP, SEEDS.stream("test"), 500) == (None, None)
    assert interval(one_PP, one_PP, one_PP, SEEDS.stream("test"), 0) == (None, None)


def test_a_zero_gradient_has_no_cosine() -> None:
    taken_PN = np.random.default_rng(1).normal(size=(2, 5))
    found = turn(taken_PN, np.zeros((2, 5)))
    assert (found.cosine, found.low, found.parts, found.norm_ratio) == (None, None, {}, 0.0)


def test_folded_vectors_keep_their_inner_products() -> None:
    size, folding = 2**12, Folding(SEEDS, size=2**12)
    errors = []
    for seed in range(20):
        a_N, noise_N = np.random.default_rng(seed).normal(size=(2, 40_000)).astype(np.float32)
        b_N = 0.8 * a_N + 0.6 * noise_N
        scale = np.sqrt(inner(a_N, a_N) * inner(b_N, b_N))
        errors.append((folding.of(a_N) @ folding.of(b_N) - inner(a_N, b_N)) / scale)
    spread = np.sqrt(2.0 / size)  # 2.2 % here, 0.3 % with `FOLDED` numbers
    assert np.abs(errors).max() < 4 * spread
    assert np.std(errors) < 1.5 * spread
    assert np.sqrt(2.0 / FOLDED) < 0.003


def test_short_vectors_are_kept_whole() -> None:
    a_N = np.arange(5, dtype=np.float32)
    np.testing.assert_array_equal(Folding(SEEDS).of(a_N), a_N)
