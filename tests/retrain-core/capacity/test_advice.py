"""What to change when it does not fit: one key, as little as possible, and it does fit then."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from retrain.capacity.advice import KEYS, SAFETY, advise
from retrain.capacity.memory import Estimate, estimate
from retrain.capacity.shape import ModelShape
from retrain.capacity.workload import Workload

GIB = 2**30
WORK = Workload(
    device="cpu",
    batch_size=64,
    group_size=16,
    max_tokens=512,
    prompt_tokens=100,
    lora_rank=32,
    micro_batch_tokens=10**6,
)
SHAPE = ModelShape(
    layers=12,
    hidden=768,
    inner=3072,
    heads=12,
    kv_heads=12,
    head_size=64,
    vocabulary=50000,
    is_tied=True,
    has_gate=True,
    experts=0,
    parameters=160_000_000,
    is_counted=True,
    context=None,
)
FIELDS = {label: name for name, label in KEYS}


def estimated(work: Workload) -> Estimate:
    return estimate(SHAPE, work)


def test_what_fits_needs_no_advice() -> None:
    assert advise(WORK, 10**15, estimated) == ""


def test_micro_batches_come_first_because_they_change_nothing() -> None:
    assert advise(WORK, 60 * GIB, estimated).startswith("set [backend.options] micro_batch_tokens = ")


def test_a_model_that_is_too_large_is_said_to_be() -> None:
    assert advise(WORK, GIB, estimated).startswith("no single key is enough")


@given(st.integers(2 * GIB, 80 * GIB), st.integers(100, 10**6))
def test_the_advice_fits_and_one_more_would_not(limit: int, micro: int) -> None:
    work = replace(WORK, micro_batch_tokens=micro)
    text = advise(work, limit, estimated)
    match = re.match(r"set (.+) = (\d+)", text)
    if not match:
        assert text == "" or text.startswith("no single key")
        return
    name, value = FIELDS[match[1]], int(match[2])
    assert 1 <= value < getattr(work, name)
    assert estimated(replace(work, **{name: value})).peak_bytes <= SAFETY * limit
