"""The key to change, so that a run fits in memory or takes less time."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

from retrain.kernel.config.resolved import Config
from retrain.kernel.contracts.memory import MemoryEstimate, Workload
from retrain.records.campaign_table import is_campaign
from retrain.text.amounts import percent
from retrain.tools.capacity.workload import SAFETY, device_kind, schedule_of

# Share of the step's time. Sampling and training take about equal shares when both run near their limits.
DOMINANT = 0.6
# Scoring overlaps with sampling, so waiting for it is pure loss.
WAITING = 0.3
Estimated = Callable[[Workload], MemoryEstimate]

# Tried first, as it does not change the gradient.
MICRO = ("micro_batch_tokens", "[backend.options] micro_batch_tokens")
KEYS = (
    ("batch_size", "[training] batch_size"),
    ("group_size", "[training] group_size"),
    ("max_tokens", "[training] max_tokens"),
    ("lora_rank", "[model] lora_rank"),
)
NO_KEY = "no key is enough: use a smaller [model] model, or a device with more memory"
FLOORS = {"group_size": 2}  # a group of one carries no signal
# Ways to store a GPU's frozen weights, the most accurate first.
QUANTISED = ("int8", "nf4")
# A value cut to less than this share is a larger change than 8-bit weights.
KEPT = 0.5
USUAL_RANK = 32  # of an adapter where all weights are too many to train
FEWEST_EXAMPLES = 8  # an estimate from fewer says nothing


def advise(work: Workload, limit_bytes: int, estimated: Estimated, *, can_quantise: bool = True) -> str:
    """Return one sentence, "" if the work fits: the key that suffices with the least change, and its largest value.

    On a GPU, quantised weights are offered next to a value of less than half. A second key is named only if no single
    one suffices, and a smaller model only if two do not either.
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
    """Return `sampling 78% with engine = 'pytorch': try ...`, or "" if no phase dominates or no key would help."""
    if shares.get("score", 0.0) >= WAITING:
        return f"waiting for scores {percent(shares['score'], 0)}: try [scoring] workers, or a faster [reward]"
    if config.backend.backend != "local" or shares.get("sample", 0.0) < DOMINANT:
        return ""
    engine = config.inference.engine
    share = f"sampling {percent(shares['sample'], 0)} with engine = {engine!r}"
    if engine != "pytorch":
        return f"{share}: try more servers in [inference] url, or [inference] max_concurrent"
    has_gpu = device_kind(config.backend.devices) == "cuda"
    return f'{share}: try [inference] kv_cache_dtype = "fp8", or engine = "vllm" on another GPU' if has_gpu else ""


def _least_change(work: Workload, room: int, estimated: Estimated) -> tuple[float, str]:
    """Return the share of its value that the key keeps, and the key with its new value; (0, "") if no key suffices."""
    keys = {label: name for name, label in KEYS if getattr(work, name)}
    values = {label: (name, _largest_that_fits(work, name, room, estimated)) for label, name in keys.items()}
    found = [(value / getattr(work, name), f"{label} = {value}") for label, (name, value) in values.items() if value]
    return max(found) if found else (0.0, "")


def _smaller_weights(work: Workload, room: int, estimated: Estimated, can_quantise: bool) -> str:
    """Return an adapter instead of all weights, or weights in fewer bits, with one more key where needed."""
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
    can = work.lora_rank and work.quantize == "none" and not work.is_served
    return [replace(work, quantize=kind) for kind in QUANTISED] if can else []


def _largest_that_fits(work: Workload, name: str, room: int, estimated: Estimated) -> int | None:
    now = getattr(work, name) or estimated(work).pack_tokens  # 0 = chosen by the backend
    # Bisection, as the needs never fall when a size grows; an estimate takes milliseconds.
    values = range(FLOORS.get(name, 1), now)
    count = bisect_right(values, 0, key=lambda value: estimated(work.with_size(name, value)).needed_bytes > room)
    return values[count - 1] if count else None


def shorter_evaluations(config: Config, share: partial[float]) -> str:
    """Return the fewest keys with which evaluations take no longer than training."""
    now, steps = config.eval, schedule_of(config).max_steps
    if now.every and share(every=0) <= 1.0:
        values = range(now.every, steps + 1)
        return f"set [eval] every = {values[bisect_left(values, -1.0, key=lambda every: -share(every=every))]}"
    for name, least in (("examples", FEWEST_EXAMPLES), ("samples", 1)):
        if value := _largest(range(least, getattr(now, name)), name, share):
            return _set({name: value})
    fewer = {name: value for name, value in {"samples": 1, "every": 0}.items() if getattr(now, name) != value}
    if value := _largest(range(FEWEST_EXAMPLES, now.examples + 1), "examples", partial(share, **fewer)):
        return _set(fewer | ({"examples": value} if value < now.examples else {}))
    enough = f"[{'campaign' if is_campaign(config) else 'training'}] max_steps = {math.ceil(steps * share(**fewer))}"
    return f"{_set(fewer)} and {enough}" if fewer else f"set {enough}"


def _largest(values: range, name: str, share: partial[float]) -> int:
    count = bisect_right(values, 1.0, key=lambda value: share(**{name: value}))
    return values[count - 1] if count else 0


def _set(changes: dict[str, int]) -> str:
    return "set " + " and ".join(f"[eval] {name} = {value}" for name, value in changes.items())
