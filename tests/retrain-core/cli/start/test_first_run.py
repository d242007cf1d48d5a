"""The sizes of a first run follow from the machine's speed: no time is measured here."""

from __future__ import annotations

from dataclasses import fields, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.cli.start.first_run import RUN_S, Sizes, Speed, fit

WANTED = Sizes(
    batch_size=8, group_size=16, max_tokens=2048, max_steps=100, eval_examples=64, eval_samples=4, eval_every=20
)
SLOW = Speed(
    prefill_s=1e-3, decode_s=0.1, sample_s=1 / 120, train_s=1 / 100, start_s=20.0, prompt_tokens=40
)  # 135 M parameters


def test_a_fast_machine_keeps_every_size() -> None:
    assert fit(WANTED, replace(SLOW, prefill_s=1e-7, decode_s=1e-7, sample_s=1e-7, train_s=1e-7)) == WANTED


def test_two_cores_and_a_model_of_135_million_parameters() -> None:
    sizes = fit(WANTED, SLOW)
    assert WANTED.evaluation_s(SLOW) > 3600  # as it was written before
    assert sizes.first_step_s(SLOW) <= 180
    assert sizes.run_s(SLOW) <= 1800
    assert sizes.evaluations_s(SLOW) <= sizes.training_s(SLOW) / 2
    assert sizes.max_steps >= 15
    assert sizes.group_size >= 4


@settings(max_examples=40)
@given(
    sample=st.floats(1e-7, 0.1),
    train=st.floats(1e-7, 0.1),
    start=st.floats(0, 60),
    steps=st.integers(1, 500),
    examples=st.integers(0, 64),
)
def test_no_size_grows_and_both_targets_hold(
    sample: float, train: float, start: float, steps: int, examples: int
) -> None:
    wanted = replace(WANTED, max_steps=steps, eval_examples=examples)
    speed = replace(SLOW, decode_s=sample, sample_s=sample, train_s=train, start_s=start)
    sizes = fit(wanted, speed)
    for each in fields(Sizes):
        if each.name != "eval_every":  # 0 means never in between
            assert (getattr(sizes, each.name) >= 1) or not examples
            assert getattr(sizes, each.name) <= getattr(wanted, each.name)
    assert sizes.first_step_s(speed) <= 180
    assert sizes.run_s(speed) <= RUN_S


def test_steps_that_the_user_set_are_kept_and_made_shorter() -> None:
    sizes = fit(WANTED, SLOW, keep_steps=True)
    assert sizes.max_steps == WANTED.max_steps
    assert sizes.run_s(SLOW) <= 1800
