"""The suite of samplers distinguishes a sound one from broken ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Failures = Callable[..., dict[str, str]]
BROKEN = (
    ("LeavesThePool", "chooses_training_examples", "it chose ['held out']"),
    ("OneShort", "chooses_training_examples", "choose() returned [] for 1 prompts"),
    ("ForgetsTaken", "chooses_each_once", "request all 12 prompts"),
    ("Learns", "answers_the_same_when_asked_again", "for step 0 it chose"),
    ("Rolls", "chooses_by_the_seed", "the prompts of step 0"),
    ("Certain", "chooses_training_examples", "chances [1.01]"),
    ("Divides", "bears_groups_that_say_nothing", "ZeroDivisionError"),
    ("StartsAnew", "goes_on_after_a_resume", "the choices for step 1"),
)


def test_a_sound_one_passes(failures: Failures) -> None:
    assert failures("sampler", "sampler_parts.Sampler") == {}


@pytest.mark.parametrize(("part", "check", "words"), BROKEN)
def test_broken_ones_are_named(part: str, check: str, words: str, failures: Failures) -> None:
    assert words in failures("sampler", f"sampler_parts.{part}", only=check)[check]
