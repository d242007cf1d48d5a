"""The smallest change of one key with which a run would fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from retrain.rooms.capacity.estimate import MemoryEstimate, Workload

Estimated = Callable[[Workload], MemoryEstimate]

# Of the memory there is: on a CPU the estimate may be 15 % low, on a GPU it counts more than a step holds at a time.
SAFETY = {"cpu": 0.9, "cuda": 0.95}
MICRO = ("micro_batch_tokens", "[backend.options] micro_batch_tokens")  # first, since it changes no gradient
KEYS = (
    ("batch_size", "[training] batch_size"),
    ("group_size", "[training] group_size"),
    ("max_tokens", "[training] max_tokens"),
    ("lora_rank", "[model] lora_rank"),
)
FLOORS = {"group_size": 2}  # a group of one teaches nothing


def advise(work: Workload, limit_bytes: int, estimated: Estimated) -> str:
    """One sentence, "" when it fits: the largest value of a key that does, of the key that loses least.

    A second key is named only when none is enough alone, and a smaller model when two are not either.
    """
    room = int(limit_bytes * SAFETY[work.device])
    if estimated(work).needed_bytes <= room:
        return ""
    micro = _largest_that_fits(work, MICRO[0], room, estimated)
    if micro is not None:
        return f"set {MICRO[1]} = {micro}: the gradient stays the same"
    if change := _least_change(work, room, estimated):
        return f"set {change}"
    one_row = work.prompt_tokens + work.max_tokens
    if change := _least_change(replace(work, micro_batch_tokens=one_row), room, estimated):
        return f"set {change} and {MICRO[1]} = {one_row}"
    return "no key is enough: use a smaller [model] model, or a device with more memory"


def _least_change(work: Workload, room: int, estimated: Estimated) -> str:
    values = {label: (name, _largest_that_fits(work, name, room, estimated)) for name, label in KEYS}
    found = [(value / getattr(work, name), f"{label} = {value}") for label, (name, value) in values.items() if value]
    return max(found)[1] if found else ""


def _largest_that_fits(work: Workload, name: str, room: int, estimated: Estimated) -> int | None:
    now = getattr(work, name) or estimated(work).pack_tokens  # a size that is found by itself
    low, high = FLOORS.get(name, 1), now - 1
    if high < low or estimated(work.with_size(name, low)).needed_bytes > room:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if estimated(work.with_size(name, middle)).needed_bytes <= room:
            low = middle
        else:
            high = middle - 1
    return low
