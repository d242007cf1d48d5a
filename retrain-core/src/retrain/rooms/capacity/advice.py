"""Which key to change: the smallest change with which a run fits in memory, and where most of its time went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from retrain.kernel.config.resolved import Config
from retrain.rooms.capacity.estimate import MemoryEstimate, Workload
from retrain.rooms.capacity.machine import device_kind

DOMINANT = 0.6  # of the step time; sampling and training take about equal shares when both run near their limits
WAITING = 0.3  # scoring overlaps with sampling, so waiting for it is pure loss
Estimated = Callable[[Workload], MemoryEstimate]

# Usable share of memory: on a CPU the estimate may be 15 % low, on a GPU it is an upper bound.
SAFETY = {"cpu": 0.9, "cuda": 0.95}
MICRO = ("micro_batch_tokens", "[backend.options] micro_batch_tokens")  # tried first: it does not change the gradient
KEYS = (
    ("batch_size", "[training] batch_size"),
    ("group_size", "[training] group_size"),
    ("max_tokens", "[training] max_tokens"),
    ("lora_rank", "[model] lora_rank"),
)
FLOORS = {"group_size": 2}  # a group of one carries no signal


def advise(work: Workload, limit_bytes: int, estimated: Estimated) -> str:
    """One sentence, "" if it fits: of the keys that suffice the one that changes least, with its largest such value.

    A second key is named only if no single one suffices, and a smaller model only if two do not either.
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


def hint(shares: Mapping[str, float], config: Config) -> str:
    """`sampling 78 % with engine = 'pytorch': try ...`, or "" if no phase dominates or no key would help."""
    if shares.get("score", 0.0) >= WAITING:
        return f"waiting for scores {_percent(shares['score'])}: try [scoring] workers, or a faster [reward]"
    if config.backend.backend != "local":
        return ""
    has_gpu = device_kind(config.backend.devices) == "cuda"
    engine = config.value("inference.engine", "pytorch")
    if shares.get("sample", 0.0) >= DOMINANT:
        share = f"sampling {_percent(shares['sample'])} with engine = {engine!r}"
        if engine != "pytorch":
            return f"{share}: try more servers in [inference] url, or [inference] max_concurrent"
        return f'{share}: try [inference] kv_cache_dtype = "fp8", or engine = "vllm" on another GPU' if has_gpu else ""
    if shares.get("train", 0.0) >= DOMINANT and has_gpu:
        options = config.backend.options
        if not options.get("compile"):
            return f"training {_percent(shares['train'])}: try [backend.options] compile = true"
    return ""


def _least_change(work: Workload, room: int, estimated: Estimated) -> str:
    values = {label: (name, _largest_that_fits(work, name, room, estimated)) for name, label in KEYS}
    found = [(value / getattr(work, name), f"{label} = {value}") for label, (name, value) in values.items() if value]
    return max(found)[1] if found else ""


def _largest_that_fits(work: Workload, name: str, room: int, estimated: Estimated) -> int | None:
    now = getattr(work, name) or estimated(work).pack_tokens  # 0 = chosen by the backend
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


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
