"""Contract of a backend's `estimate_memory`: the workload, and a backend's estimate of the memory it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Sizes of a step: `prompt_tokens` is the longest prompt, `max_tokens` the limit of every completion.

    `micro_batch_tokens` and `cache_bytes` are 0 if the backend chooses them. `samplers` is 0 if one device does
    everything, otherwise the number of devices that sample while another trains. `is_served`: a server samples.
    `model_dtype` and `quantize` are keys of `[model]`, the rest are values of `[inference]` and `[backend.options]`.
    """

    device: str
    batch_size: int
    group_size: int
    max_tokens: int
    prompt_tokens: int
    lora_rank: int
    micro_batch_tokens: int = 0
    eval_completions: int = 0
    greedy_completions: int = 0
    cache_bytes: int = 0
    samplers: int = 0
    is_served: bool = False
    is_sharing: bool = True
    gradient_checkpointing: str = "auto"
    model_dtype: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantize: str = "none"

    def with_size(self, name: str, value: int) -> Workload:
        changes: dict[str, Any] = {name: value}
        return replace(self, **changes)

    @property
    def completions(self) -> int:
        return self.batch_size * self.group_size

    @property
    def most_sampled(self) -> int:
        """Completions sampled together, in a step or an evaluation, whichever are more."""
        return max(self.completions, self.eval_completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSize:
    name: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}, {self.bytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPhase:
    """A phase of the step, in bytes: `resident` stays on its device in every phase, `parts` only in this one.

    `block_bytes` is the size of its typical allocation, `at_once` the number of completions processed in parallel.
    """

    name: str
    resident: Mapping[str, int]
    parts: Mapping[str, int]
    biggest: TensorSize
    block_bytes: int = 0
    at_once: int = 0

    @property
    def peak_bytes(self) -> int:
        return sum(self.resident.values()) + sum(self.parts.values())

    def together_with(self, other: MemoryPhase, *, name: str) -> MemoryPhase:
        """Both phases at the same time in one memory, with the same resident bytes."""
        names = dict.fromkeys([*self.parts, *other.parts])
        parts = {each: self.parts.get(each, 0) + other.parts.get(each, 0) for each in names}
        biggest = max(self.biggest, other.biggest, key=attrgetter("bytes"))
        return replace(self, name=name, parts=parts, biggest=biggest, at_once=max(self.at_once, other.at_once))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Peak memory by phase; on one device the phases take turns.

    `pack_tokens` is the size of one forward and backward pass, `at_once` the number of completions sampled in parallel.
    `needed_bytes` is the minimum: on a GPU, cache and packs shrink to the free memory, down to a single row.
    """

    phases: tuple[MemoryPhase, ...]
    pack_tokens: int
    at_once: int
    needed_bytes: int

    @property
    def worst(self) -> MemoryPhase:
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.worst.peak_bytes

    @property
    def biggest(self) -> TensorSize:
        return max((phase.biggest for phase in self.phases), key=attrgetter("bytes"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryModel:
    """A backend's estimate for one model: `estimate(work, runtime_bytes, device_bytes)`, and the sizes behind it.

    `parameters` counts all weights, exactly when `is_counted`, by formula otherwise; `lora_parameters` the configured
    adapter's; `context` is the longest row, None if the model does not say. `runtime_bytes` is the measured need of a
    process in addition to the model, None if unknown; `device_bytes` the memory of the device. `checkpoint_bytes` is
    the size of a checkpoint on disk where it is worth a word, 0 if not. `can_quantise`: the backend can keep the frozen
    weights of this model in fewer bits. `tier` says for display how the backend computes the model, if in several ways.
    """

    parameters: int
    is_counted: bool
    lora_parameters: int
    context: int | None
    estimate: Callable[[Workload, int | None, int | None], MemoryEstimate]
    checkpoint_bytes: int = 0
    can_quantise: bool = True
    tier: str = ""
