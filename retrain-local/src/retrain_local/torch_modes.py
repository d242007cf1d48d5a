"""PyTorch settings of the whole process, for the length of a block: number of threads, deterministic mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from retrain_local.sizes import ONE_THREAD_BELOW as ONE_THREAD_BELOW

PACKS_AT_A_TIME = 2  # for a small model, if there are as many cores


def threads_for(parameters: int, device: torch.device) -> int:
    """One thread for small models on a CPU, PyTorch's own setting for all others.

    The operations of a small model take microseconds, and each would end in a barrier of all threads. On an idle
    machine several threads gain little; next to one busy process, or to a second run, every barrier waits for a
    descheduled thread, and a step was measured to take a hundred times as long. One thread also makes a run's numbers
    independent of the number of cores.
    """
    return 1 if is_small(parameters, device) else torch.get_num_threads()


def is_small(parameters: int, device: torch.device) -> bool:
    """Whether a model is too small to split one operation over several threads."""
    return device.type == "cpu" and parameters < ONE_THREAD_BELOW


def pack_workers(parameters: int, device: torch.device) -> int:
    """How many packs of a step are computed concurrently: this way a small model on the CPU uses two cores.

    Unlike threads inside an operation these never wait for each other, and gradients are summed in the order of the
    packs, so results depend neither on the number of cores nor on the load of the machine.
    """
    return min(PACKS_AT_A_TIME, os.cpu_count() or 1) if is_small(parameters, device) else 1


@contextmanager
def limited_threads(count: int) -> Iterator[None]:
    """Run a block with this many threads, then restore the previous number."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def deterministic(*, warn_only: bool) -> Iterator[None]:
    """Run a block with deterministic operations; those without a deterministic form raise, or warn with `warn_only`."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fills = torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = False  # no memory is read before it is written
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = fills
