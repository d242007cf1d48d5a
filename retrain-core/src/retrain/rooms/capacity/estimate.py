"""What a backend says about its memory (`retrain_estimate_memory`), and the work it is asked about."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What a step holds: `prompt_tokens` is the longest prompt, `max_tokens` what every completion may reach.

    `micro_batch_tokens` and `cache_bytes` are 0 where the backend finds them by itself. `samplers` is 0 where one
    device does everything, otherwise how many devices sample while another trains. `is_served` says that a server
    samples. The rest are values of `[inference]` and `[backend.options]`.
    """

    device: str
    batch_size: int
    group_size: int
    max_tokens: int
    prompt_tokens: int
    lora_rank: int
    micro_batch_tokens: int = 0
    eval_completions: int = 0
    cache_bytes: int = 0
    samplers: int = 0
    is_served: bool = False
    is_sharing: bool = True
    gradient_checkpointing: str = "auto"
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"

    def with_size(self, name: str, value: int) -> Workload:
        """The same with another number under one of its names."""
        changes: dict[str, Any] = {name: value}
        return replace(self, **changes)

    @property
    def completions(self) -> int:
        """Completions per step."""
        return self.batch_size * self.group_size

    @property
    def most_sampled(self) -> int:
        """Completions that are sampled together: a step's, or an evaluation's if those are more."""
        return max(self.completions, self.eval_completions)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSize:
    """A tensor by what it is, its shape and its bytes."""

    name: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}, {self.bytes / 2**20:.1f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPhase:
    """A phase of the step: what is always there on its device (`resident`), what it holds beside that, in bytes.

    `block_bytes` is the size of the blocks that most of it is made of, `at_once` how many completions it works on side
    by side.
    """

    name: str
    resident: Mapping[str, int]
    parts: Mapping[str, int]
    biggest: TensorSize
    block_bytes: int = 0
    at_once: int = 0

    @property
    def peak_bytes(self) -> int:
        """Bytes of the phase with all that is always there."""
        return sum(self.resident.values()) + sum(self.parts.values())

    def with_part(self, name: str, size: int) -> MemoryPhase:
        """The same with one part more."""
        return replace(self, parts={**self.parts, name: size})

    def together_with(self, other: MemoryPhase, *, name: str) -> MemoryPhase:
        """Both at the same time in one memory, which has the same things always there."""
        names = dict.fromkeys([*self.parts, *other.parts])
        parts = {each: self.parts.get(each, 0) + other.parts.get(each, 0) for each in names}
        biggest = max(self.biggest, other.biggest, key=attrgetter("bytes"))
        return replace(self, name=name, parts=parts, biggest=biggest, at_once=max(self.at_once, other.at_once))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Phases, each with what is always there on its device; on one device they take turns.

    `pack_tokens` is what one forward and backward pass holds, `at_once` how many completions are sampled side by side.
    `needed_bytes` is what it cannot do without: on a GPU pool and packs take shares of what is free, down to one row.
    """

    phases: tuple[MemoryPhase, ...]
    pack_tokens: int
    at_once: int
    needed_bytes: int

    @property
    def worst(self) -> MemoryPhase:
        """The phase of the highest peak."""
        return max(self.phases, key=lambda phase: phase.peak_bytes)

    @property
    def peak_bytes(self) -> int:
        """The most memory of any device at any time."""
        return self.worst.peak_bytes

    @property
    def biggest(self) -> TensorSize:
        """The biggest tensor of any phase."""
        return max((phase.biggest for phase in self.phases), key=attrgetter("bytes"))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MemoryModel:
    """A backend's estimate for one model: `estimate(work, runtime_bytes, device_bytes)`, and the sizes it rests on.

    `parameters` counts all weights, exactly when `is_counted`, by formula otherwise; `lora_parameters` those of the
    configured adapter; `context` is the longest row, None where the model does not say. `runtime_bytes` is what a
    process was measured to need beside the model, None where nothing was; `device_bytes` the memory of the device.
    """

    parameters: int
    is_counted: bool
    lora_parameters: int
    context: int | None
    estimate: Callable[[Workload, int | None, int | None], MemoryEstimate]
