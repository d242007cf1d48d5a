"""PyTorch settings of the whole process, for the length of a block: number of threads, deterministic mode."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from retrain_local.memory.sizes import MOST_PACKS_AT_A_TIME, PACKS_AT_A_TIME
from retrain_local.memory.sizes import ONE_THREAD_BELOW as ONE_THREAD_BELOW


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


def packs_at_a_time(parameters: int, device: torch.device) -> int:
    """What the number of packs in a step is a multiple of: two for a small model on a CPU, a pack per core for others.

    The results of a small model therefore do not depend on the number of cores.
    """
    if is_small(parameters, device):
        return PACKS_AT_A_TIME
    return min(MOST_PACKS_AT_A_TIME, torch.get_num_threads()) if device.type == "cpu" else 1


def pack_workers(parameters: int, device: torch.device) -> int:
    """How many packs of a step are computed concurrently, each by one thread: this is how training uses several cores.

    Unlike threads inside an operation these never wait for each other, so a busy machine costs them no more than its
    share, and gradients are summed in the order of the packs, so results do not depend on its load. Two packs at a time
    also multiply faster than one with two threads: by 1.4 to 2 on two cores.
    """
    return min(packs_at_a_time(parameters, device), os.cpu_count() or 1)


def training_threads(threads: int, parameters: int, device: torch.device) -> int:
    """Threads inside an operation of training, if sampling has `threads`: one, unless packs leave cores over."""
    return max(1, threads // pack_workers(parameters, device)) if device.type == "cpu" else threads


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
