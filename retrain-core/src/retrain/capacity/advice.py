"""The smallest change of one key with which a run would fit in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from retrain.capacity.memory import Estimate
from retrain.capacity.workload import Workload

SAFETY = 0.9  # of the memory there is: the estimate may be 15 % low
# The first changes no gradient; the others change the run.
KEYS = (
    ("micro_batch_tokens", "[backend.options] micro_batch_tokens"),
    ("batch_size", "[training] batch_size"),
    ("group_size", "[training] group_size"),
    ("max_tokens", "[training] max_tokens"),
    ("lora_rank", "[model] lora_rank"),
)
FLOORS = {"group_size": 2}  # a group of one teaches nothing


def advise(work: Workload, limit_bytes: int, estimated: Callable[[Workload], Estimate]) -> str:
    """One sentence, "" when it fits: the largest value of a single key that does, of the key that loses least."""
    room = int(limit_bytes * SAFETY)
    if estimated(work).peak_bytes <= room:
        return ""
    found: list[tuple[float, str]] = []
    for name, label in KEYS:
        value = _largest_that_fits(work, name, room, estimated)
        if value is None:
            continue
        if name == "micro_batch_tokens":
            return f"set {label} = {value}: the gradient stays the same"
        found.append((value / getattr(work, name), f"set {label} = {value}"))
    if found:
        return max(found)[1]
    return "no single key is enough: use a smaller [model] model, or a device with more memory"


def _largest_that_fits(work: Workload, name: str, room: int, estimated: Callable[[Workload], Estimate]) -> int | None:
    low, high = FLOORS.get(name, 1), getattr(work, name) - 1
    if high < low or estimated(replace(work, **{name: low})).peak_bytes > room:
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if estimated(replace(work, **{name: middle})).peak_bytes <= room:
            low = middle
        else:
            high = middle - 1
    return low
