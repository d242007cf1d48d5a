from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.kit.shared import first_or_long

pytest.importorskip("retrain_local", reason="a loss is tried by the backend that applies it")
Failures = Callable[..., dict[str, str]]
BROKEN = (
    ("averaged", "gives_finite_numbers", "returned terms of shape (), expected (12,)"),
    ("over_the_pack", "does_not_depend_on_packs_or_order", "in 4 packs"),
    ("over_the_pack", "has_the_denominator_of_the_step", "with every row twice"),
    ("centred_in_the_pack", "does_not_depend_on_packs_or_order", "in 4 packs"),
    ("frozen", "has_the_gradient_of_its_value", "by finite differences"),
    ("upside_down", "raises_what_was_good", "where every advantage is 1, a step of gradient descent"),
    ("unclamped", "gives_finite_numbers", "with ratios of e^700 the loss is"),
    ("counting", "repeats_its_numbers", "the loss of the same step is"),
    ("ODD_MEAN", "gives_finite_numbers", "averages by 'median'"),
)


@pytest.mark.parametrize("part", first_or_long(["reinforce", "with_terms", "FROZEN"]))
def test_sound_losses_pass(part: str, failures: Failures) -> None:
    assert failures("loss", f"loss_parts.{part}") == {}


@pytest.mark.parametrize(("part", "check", "words"), first_or_long(BROKEN))
def test_broken_losses_are_named(part: str, check: str, words: str, failures: Failures) -> None:
    found = failures("loss", f"loss_parts.{part}")
    assert words in found[check]
    assert "fix: " in found[check]


@pytest.mark.long
def test_a_fault_fails_no_check_that_it_does_not_concern(failures: Failures) -> None:
    assert set(failures("loss", "loss_parts.frozen")) == {"has_the_gradient_of_its_value"}
    assert set(failures("loss", "loss_parts.upside_down")) == {"raises_what_was_good"}
    assert set(failures("loss", "loss_parts.counting")) >= {"repeats_its_numbers"}
