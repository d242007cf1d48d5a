"""Which key to change: the smallest change with which a run fits in memory, and where most of its time went."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import MemoryEstimate, Workload
from retrain.text.amounts import percent
from retrain.tools.capacity.workload import device_kind

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
NO_KEY = "no key is enough: use a smaller [model] model, or a device with more memory"
FLOORS = {"group_size": 2}  # a group of one carries no signal
QUANTISED = ("int8", "nf4")  # of a GPU's frozen weights, the closer to the given ones first
KEPT = 0.5  # a value cut to less than this share is a larger change than 8-bit weights
USUAL_RANK = 32  # of an adapter where all weights are too many to train


def advise(work: Workload, limit_bytes: int, estimated: Estimated, *, can_quantise: bool = True) -> str:
    """One sentence, "" if it fits: of the keys that suffice the one that changes least, with its largest such value.

    On a GPU quantised weights stand beside a value of less than half. A second key is named only if no single one
    suffices, and a smaller model only if two do not either.
    """
    room = int(limit_bytes * SAFETY[work.device])
    if estimated(work).needed_bytes <= room:
        return ""
    micro = _largest_that_fits(work, MICRO[0], room, estimated)
    if micro is not None:
        return f"set {MICRO[1]} = {micro}: the gradient stays the same"
    kept, change = _least_change(work, room, estimated)
    if change and (kept >= KEPT or work.device != "cuda"):
        return f"set {change}"
    smaller = _smaller_weights(work, room, estimated, can_quantise) if work.device == "cuda" else ""
    if change and " and " in smaller:  # one key is enough
        smaller = ""
    if either := [each for each in (change, smaller) if each]:
        return f"set {', or '.join(either)}"
    one_row = work.prompt_tokens + work.max_tokens
    if change := _least_change(replace(work, micro_batch_tokens=one_row), room, estimated)[1]:
        return f"set {change} and {MICRO[1]} = {one_row}"
    return NO_KEY


def hint(shares: Mapping[str, float], config: Config) -> str:
    """`sampling 78% with engine = 'pytorch': try ...`, or "" if no phase dominates or no key would help."""
    if shares.get("score", 0.0) >= WAITING:
        return f"waiting for scores {percent(shares['score'], 0)}: try [scoring] workers, or a faster [reward]"
    if config.backend.backend != "local":
        return ""
    has_gpu = device_kind(config.backend.devices) == "cuda"
    engine = config.inference.engine
    if shares.get("sample", 0.0) >= DOMINANT:
        share = f"sampling {percent(shares['sample'], 0)} with engine = {engine!r}"
        if engine != "pytorch":
            return f"{share}: try more servers in [inference] url, or [inference] max_concurrent"
        return f'{share}: try [inference] kv_cache_dtype = "fp8", or engine = "vllm" on another GPU' if has_gpu else ""
    if shares.get("train", 0.0) >= DOMINANT and has_gpu:
        options = config.backend.options
        if not options.get("compile"):
            return f"training {percent(shares['train'], 0)}: try [backend.options] compile = true"
    return ""


def _least_change(work: Workload, room: int, estimated: Estimated) -> tuple[float, str]:
    """The share of its value that the key keeps, and the key with its new value; (0, "") if no key suffices."""
    keys = {label: name for name, label in KEYS if getattr(work, name)}
    values = {label: (name, _largest_that_fits(work, name, room, estimated)) for label, name in keys.items()}
    found = [(value / getattr(work, name), f"{label} = {value}") for label, (name, value) in values.items() if value]
    return max(found) if found else (0.0, "")


def _smaller_weights(work: Workload, room: int, estimated: Estimated, can_quantise: bool) -> str:
    """An adapter instead of all weights, or weights in fewer bits, with one more key where they do not suffice."""
    if not work.lora_rank:
        work = work.with_size("lora_rank", USUAL_RANK)
        adapter = f"[model] lora_rank = {USUAL_RANK}"
        return f"{adapter}: an adapter, not all weights" if estimated(work).needed_bytes <= room else ""
    tried = [(each.quantize, each) for each in quantised_ways(work) if can_quantise]
    for name, quantised in tried:
        if estimated(quantised).needed_bytes <= room:
            return f'[model] quantize = "{name}"'
    changes = [(*_least_change(quantised, room, estimated), name) for name, quantised in tried]
    _, change, name = max(changes, default=(0.0, "", ""))
    return f'[model] quantize = "{name}" and {change}' if change else ""


def quantised_ways(work: Workload) -> list[Workload]:
    """The work with frozen weights in fewer bits, where the backend can sample from them."""
    can = work.lora_rank and work.quantize == "none" and not work.is_served and work.dtype != "fp8"
    return [replace(work, quantize=kind) for kind in QUANTISED] if can else []


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
