"""The key to change when it does not fit: one, as little as possible, and it does fit then."""

from __future__ import annotations

import re
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.kernel.contracts.memory import MemoryEstimate, Workload
from retrain.tools.capacity.advice import KEYS, MICRO, NO_KEY, advise
from retrain.tools.capacity.workload import SAFETY
from retrain_local.memory.estimate import estimate
from retrain_local.memory.shape import ModelShape

GIB = 2**30
STEP = {"batch_size": 64, "group_size": 16, "max_tokens": 512, "prompt_tokens": 100, "lora_rank": 32}
WORK = Workload(device="cpu", micro_batch_tokens=10**6, **STEP)
SIZES = {"layers": 12, "hidden": 768, "inner": 3072, "heads": 12, "kv_heads": 12, "head_size": 64, "vocabulary": 50000}
PARTS = {"is_tied": True, "has_gate": True, "experts": 0, "active_experts": 1}
SHAPE = ModelShape(**SIZES, **PARTS, parameters=160_000_000, is_counted=True, context=None)
FIELDS = {label: name for name, label in (MICRO, *KEYS)}


def estimated(work: Workload) -> MemoryEstimate:
    return estimate(SHAPE, work)


def test_micro_batches_come_first_because_they_change_nothing_and_no_key_may_be_enough() -> None:
    assert advise(WORK, 10**15, estimated) == ""
    assert advise(WORK, 16 * GIB, estimated).startswith("set [backend.options] micro_batch_tokens = ")
    assert advise(WORK, GIB, estimated) == NO_KEY


@settings(max_examples=25)
@given(st.integers(2 * GIB, 80 * GIB), st.integers(100, 10**6))
def test_the_advice_fits_and_one_more_would_not(limit: int, micro: int) -> None:
    work = replace(WORK, micro_batch_tokens=micro)
    text = advise(work, limit, estimated)
    changes = {FIELDS[label]: int(value) for label, value in re.findall(r"(\[[^]]+\] \w+) = (\d+)", text)}
    if not changes:
        assert text in ("", NO_KEY)
        return
    assert all(value >= 1 for value in changes.values())
    assert next(iter(changes)) != "lora_rank" or changes["lora_rank"] < work.lora_rank
    for name, value in changes.items():
        work = work.with_size(name, value)
    assert estimated(work).needed_bytes <= SAFETY["cpu"] * limit


def test_two_keys_are_named_when_one_is_not_enough() -> None:
    one_row = WORK.prompt_tokens + WORK.max_tokens
    tight = (advise(WORK, limit * GIB // 8, estimated) for limit in range(8, 80, 3))
    assert any(f" and [backend.options] micro_batch_tokens = {one_row}" in each for each in tight)
