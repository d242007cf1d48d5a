from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from retrain.api import BackendError
from retrain_local.memory.limits import MemoryLimits, free_bytes, free_host_bytes, is_out_of_memory


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
