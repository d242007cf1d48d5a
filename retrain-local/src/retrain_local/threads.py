"""How many CPU threads a model is worth."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from retrain_local.sizes import ONE_THREAD_BELOW as ONE_THREAD_BELOW

PACKS_AT_A_TIME = 2  # of a small model, where there are as many cores


def threads_for(parameters: int, device: torch.device) -> int:
    """One thread for small models on the CPU, and what PyTorch is set to for all others.

    The operations of a small model take microseconds, and every one of them would end in a meeting of all threads.
    On an idle machine that gains a little; with one other busy process, or two runs side by side, each meeting waits
    for a thread that is not running, and a step was measured to take a hundred times as long. One thread also makes
    a run's numbers independent of the number of cores.
    """
    return 1 if is_small(parameters, device) else torch.get_num_threads()


def is_small(parameters: int, device: torch.device) -> bool:
    """Whether a model is too small to share an operation of it out to several threads."""
    return device.type == "cpu" and parameters < ONE_THREAD_BELOW


def pack_workers(parameters: int, device: torch.device) -> int:
    """How many packs of a step are computed at a time: small models on the CPU use two cores that way.

    Unlike the threads inside an operation these never wait for each other, and gradients are added up in the order of
    the packs, so the numbers depend neither on the number of cores nor on what else the machine does.
    """
    return min(PACKS_AT_A_TIME, os.cpu_count() or 1) if is_small(parameters, device) else 1


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Run a block with this many threads and give the process its own number back."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
