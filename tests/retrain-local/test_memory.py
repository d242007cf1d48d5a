from __future__ import annotations

from dataclasses import asdict

import pytest
import torch

from retrain.api import BackendError
from retrain_local.memory import MemoryLimits, is_out_of_memory


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
    saved = MemoryLimits(train_tokens=1, cache_tokens=3, pack_tokens=4, recompute=True)
    loaded = MemoryLimits()
    loaded.restore(asdict(saved))
    assert loaded == saved
    loaded.restore({"cache_tokens": 7})
    assert loaded == MemoryLimits(cache_tokens=7)
