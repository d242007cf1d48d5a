"""The packs of a CPU: activations are kept where memory is free, whatever a GPU would need for full speed."""

from __future__ import annotations

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.api import BackendError
from retrain_local.memory.limits import MemoryLimits, free_bytes, free_host_bytes, is_out_of_memory
from retrain_local.memory.sizes import FULL_SPEED_TOKENS_CPU, PROMPTS_PER_PACK, TOKEN_BUDGET, PackPlan, plan_cpu_packs

MIB, GIB = 2**20, 2**30
SMOLLM2 = 1_524_096, 154_368  # bytes of a token in fp32: 30 layers of width 576 and 1,536, kept and recomputed


def plan(free: float, asked: str = "auto", sizes: tuple[int, int] = SMOLLM2, **more: int) -> PackPlan:
    given = {"at_a_time": 2, "prompt": 40, "context": 8192} | more
    return plan_cpu_packs(*sizes, free, checkpointing=asked, **given)


def test_a_model_of_135_million_parameters_keeps_its_activations_with_20_gb_free() -> None:
    found = plan(20 * GIB)
    assert not found.recompute
    assert FULL_SPEED_TOKENS_CPU <= found.tokens <= TOKEN_BUDGET["cpu"]
    assert 2 * found.tokens * SMOLLM2[0] < 1.2 * GIB, "no more memory than full speed needs"
    assert found.kept_tokens == 2048 <= 0.5 * 20 * GIB / 2 / SMOLLM2[0], "a longer row is recomputed"
    assert plan(20 * GIB, context=2048).kept_tokens == 0, "no row is longer"
    assert found == plan(16 * GIB), "checkpoints seldom depend on how much memory is free"


def test_little_memory_means_recomputation_unless_the_user_decides_and_a_long_prompt_a_larger_pack() -> None:
    assert plan(2 * GIB).recompute
    assert not plan(2 * GIB, asked="off").recompute
    assert plan(20 * GIB, asked="on").recompute
    assert plan(20 * GIB, asked="off").kept_tokens == plan(2 * GIB).kept_tokens == 0
    assert plan(0.0) == plan(1.0) == PackPlan(tokens=1, recompute=True)
    assert plan(20 * GIB, prompt=300).tokens == PROMPTS_PER_PACK * 300
    assert plan(20 * GIB, prompt=4000).tokens == TOKEN_BUDGET["cpu"]
    assert plan(math.inf, prompt=4000).kept_tokens == 0


@settings(max_examples=40, deadline=None)
@given(
    free=st.floats(0, 2**50),
    kept=st.integers(1, 2**30),
    share=st.floats(0.01, 1.0),
    at_a_time=st.integers(1, 8),
    prompt=st.integers(0, 10**6),
    asked=st.sampled_from(["auto", "on", "off"]),
)
def test_plans_take_half_memory(free: float, kept: int, share: float, at_a_time: int, prompt: int, asked: str) -> None:
    sizes = kept, max(1, int(share * kept))
    found = plan(free, asked=asked, at_a_time=at_a_time, prompt=prompt, sizes=sizes)
    each = sizes[1] if found.recompute else sizes[0]
    assert found.tokens == 1 or at_a_time * found.tokens * each <= free / 2
    assert plan(2 * free, asked=asked, at_a_time=at_a_time, prompt=prompt, sizes=sizes).recompute <= found.recompute
    if found.kept_tokens:
        assert found.tokens <= found.kept_tokens


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (torch.OutOfMemoryError("x"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 1 GB)"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("shape '[3]' is invalid for input of size 4"), False),
        (BackendError("the disk ran out of memory"), False),
    ],
)
def test_only_allocators_run_out_of_memory(error: RuntimeError, wanted: bool) -> None:
    assert is_out_of_memory(error) is wanted


def test_limits_come_back_as_they_were_saved_and_from_older_checkpoints() -> None:
    saved = MemoryLimits(
        train_tokens=1, cache_tokens=3, pack_tokens=4, recompute=True, kept_tokens=5, packs_at_a_time=2
    )
    loaded = MemoryLimits()
    loaded.restore(asdict(saved))
    assert loaded == saved
    loaded.restore({"cache_tokens": 7})
    assert loaded == MemoryLimits(cache_tokens=7)


def test_free_memory_is_what_machine_and_container_leave(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    cgroup.mkdir()
    meminfo.write_text("MemTotal: 900 kB\nMemFree: 1 kB\nMemAvailable:     600 kB\n")
    assert free_host_bytes(meminfo, cgroup) == 600 * 1024
    for name, text in (("memory.max", "max"), ("memory.current", "100"), ("memory.stat", "anon 7\ninactive_file 50\n")):
        (cgroup / name).write_text(text)
    assert free_host_bytes(meminfo, cgroup) == 600 * 1024
    (cgroup / "memory.max").write_text("1000")
    assert free_host_bytes(meminfo, cgroup) == 1000 - 100 + 50
    (cgroup / "memory.current").write_text("2000")
    assert free_host_bytes(meminfo, cgroup) == 0
    assert free_host_bytes(tmp_path / "none", tmp_path / "none") > 2**20  # a system without these files
    assert free_bytes(torch.device("cpu")) > 2**20
