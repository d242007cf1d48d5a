"""Peak memory of a run on the backend `local`, phase by phase, from sizes alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from retrain.capacity import local_backend as local
from retrain.capacity.shape import ModelShape
from retrain.capacity.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor by what it is, its shape and its bytes."""

    name: str
    shape: tuple[int, ...]
    bytes: int

    def __str__(self) -> str:
        return f"{self.name} {list(self.shape)}, {self.bytes / local.MIB:.1f} MiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A phase of the step: what it holds beside what is always there, in bytes, and its biggest tensor.

    `block_bytes` is the size of the blocks that most of it is made of.
    """

    name: str
    parts: Mapping[str, int]
    biggest: Tensor
    block_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """`resident` is always there; a phase comes on top of it, and the two phases take turns."""

    resident: Mapping[str, int]
    phases: tuple[Phase, ...]

    def peak_of(self, phase: Phase) -> int:
        """Bytes of a phase, with all that is always there."""
        return sum(self.resident.values()) + sum(phase.parts.values())

    @property
    def worst(self) -> Phase:
        """The phase of the highest peak."""
        return max(self.phases, key=self.peak_of)

    @property
    def peak_bytes(self) -> int:
        """The most memory at any time."""
        return self.peak_of(self.worst)

    @property
    def biggest(self) -> Tensor:
        """The biggest tensor of any phase."""
        return max((phase.biggest for phase in self.phases), key=lambda tensor: tensor.bytes)


def estimate(
    shape: ModelShape, work: Workload, *, runtime_bytes: int | None = None, device_bytes: int | None = None
) -> Estimate:
    """Peak memory when every completion reaches `max_tokens`.

    `runtime_bytes`, measured, takes the place of what an empty process is known to need. `device_bytes` is the memory
    of the GPU, of which the key-value cache takes a share. On a GPU this is device memory, without the host's.
    """
    element = local.WEIGHT_BYTES[work.device]
    adapter = shape.lora_parameters(work.lora_rank) * local.ADAPTER_BYTES
    is_merged = element == 4 and shape.adapted_elements <= local.MERGE_LIMIT
    runtime = local.RUNTIME_BYTES[work.device] if runtime_bytes is None else runtime_bytes
    resident = {
        "runtime": runtime,
        "weights": shape.parameters * element,
        "sampler": shape.adapted_elements * element if is_merged else adapter,
        "adapter": adapter,
        "optimizer": 2 * adapter,
    }
    if work.device == "cpu":
        resident["host"] = work.most_sampled * work.max_tokens * local.HOST_TOKEN_BYTES
    free = (device_bytes or 0) - resident["weights"] - resident["sampler"] - adapter
    cache_bytes = int(local.CACHE_SHARE_GPU * max(free, 0)) if work.device == "cuda" else local.CACHE_BYTES_CPU
    training = _training(shape, work, element)
    kept = int(local.HEAP_KEPT * training.parts["activations"]) if _is_heap(training.block_bytes, work.device) else 0
    return Estimate(resident=resident, phases=(_sampling(shape, work, element, cache_bytes, kept), training))


def grown_capacity(prompt: int, new: int) -> int:
    """Positions that a cache of `prompt` tokens has once `new` more were appended one by one."""
    capacity, length = prompt, prompt
    while length + new > capacity and new > 0:
        step = max(1, capacity + 1 - length)
        length, new = length + step, new - step
        if length > capacity:
            capacity = length + max(local.CACHE_CHUNK, length // 2)
    return capacity


def _sampling(shape: ModelShape, work: Workload, element: int, cache_bytes: int, kept_bytes: int) -> Phase:
    per_token = 2 * shape.layers * shape.kv_heads * shape.head_size * element
    length = work.prompt_tokens + work.max_tokens
    budget = max(1, cache_bytes // per_token) if work.device == "cpu" or cache_bytes else 0
    rows = work.most_sampled
    if budget:
        rows = max(1, min(rows, budget // (length + local.SEGMENT)))
    capacity = grown_capacity(work.prompt_tokens, work.max_tokens)
    used = _touched(length, capacity, shape.head_size * element) if work.device == "cpu" else capacity
    drawn = min(rows * shape.vocabulary, max(local.DRAW_CHUNK, shape.vocabulary))
    prefill = min(work.batch_size * work.prompt_tokens, max(local.PREFILL_TOKENS, work.prompt_tokens))
    wide = max(rows, prefill) * (3 * shape.inner + 4 * shape.hidden) * element
    logits = rows * shape.vocabulary * 4
    parts = {
        "kv_cache": rows * used * per_token,
        "cache_growth": rows * length * per_token // shape.layers,  # old and new of the layer that grows
        "activations": _on_heap(wide, max(rows, prefill) * shape.inner * element, work.device),
        "draw": _on_heap(drawn * local.DRAW_BYTES + logits, drawn * 8, work.device),
        "heap_kept": kept_bytes,
    }
    keys = (rows, shape.kv_heads, capacity, shape.head_size)
    chunk = (max(1, drawn // shape.vocabulary), shape.vocabulary)
    tensors = (
        Tensor(name="keys of a layer", shape=keys, bytes=math.prod(keys) * element),
        Tensor(name="fp64 probabilities", shape=chunk, bytes=math.prod(chunk) * 8),
        _embedding(shape, element),
    )
    biggest = max(tensors, key=lambda tensor: tensor.bytes)
    return Phase(name="sampling", parts=parts, biggest=biggest, block_bytes=tensors[0].bytes)


def _training(shape: ModelShape, work: Workload, element: int) -> Phase:
    width = work.prompt_tokens + work.max_tokens - 1  # the last token predicts nothing
    by_logits = max(1, local.TRAIN_LOGITS // shape.vocabulary // work.max_tokens)
    rows = max(1, min(work.completions, work.micro_batch_tokens // width, by_logits))
    tokens, actions = rows * width, rows * work.max_tokens
    saved = _saved_elements(shape, work.lora_rank)
    wide_share = 4 * shape.inner / saved
    inner_bytes, hidden_bytes = tokens * shape.inner * element, tokens * shape.hidden * element
    if work.device == "cuda":  # one activation per layer is kept, the others of one layer are made again
        activations = tokens * (shape.layers * shape.hidden + 2 * saved) * element
    else:
        total = tokens * shape.layers * saved * element
        wide = _on_heap(int(total * wide_share), inner_bytes, work.device)
        activations = wide + _on_heap(int(total * (1.0 - wide_share)), hidden_bytes, work.device)
    logits = actions * shape.vocabulary
    chunk = min(logits, max(local.LOSS_CHUNK, shape.vocabulary))
    head = _on_heap(2 * logits * element + 2 * chunk * 4, logits * element, work.device)
    block = _on_heap(tokens * (2 * shape.inner + shape.hidden) * element, inner_bytes, work.device)
    parts = {
        "activations": activations,
        # gradients of the head come first, those of a block when the logits are gone
        ("logits" if head >= block else "backward"): max(head, block),
        "gradients": shape.lora_parameters(work.lora_rank) * local.ADAPTER_BYTES,
    }
    inner = (rows, width, shape.inner)
    tensors = (
        Tensor(name="logits", shape=(actions, shape.vocabulary), bytes=logits * element),
        Tensor(name="activations of a layer", shape=inner, bytes=inner_bytes),
        _embedding(shape, element),
    )
    biggest = max(tensors, key=lambda tensor: tensor.bytes)
    return Phase(name="training", parts=parts, biggest=biggest, block_bytes=inner_bytes)


def _saved_elements(shape: ModelShape, rank: int) -> int:
    """Numbers per token and layer that the backward pass needs, with frozen matrices and LoRA beside each.

    The residual stream and the input of A twice each; attention's input, queries before and after rotation, and its
    output; keys and values likewise; the four wide ones of a gated MLP; A x of all seven matrices.
    """
    attention, keys = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    adapters = sum(count for _, _, count in shape.linears)
    return 4 * shape.hidden + 3 * attention + 3 * keys + 4 * shape.inner + adapters * rank


def _embedding(shape: ModelShape, element: int) -> Tensor:
    size = (shape.vocabulary, shape.hidden)
    return Tensor(name="embedding", shape=size, bytes=math.prod(size) * element)


def _touched(length: int, capacity: int, position_bytes: int) -> int:
    """Positions of a row's capacity whose pages are written: what is reserved and never used is not resident."""
    pages = math.ceil(length * position_bytes / local.PAGE_BYTES)
    return min(capacity, math.ceil(pages * local.PAGE_BYTES / position_bytes))


def _on_heap(total: int, block: int, device: str) -> int:
    """Resident bytes of `total` bytes in blocks of `block`: see `HEAP_WASTE`."""
    return int(total * local.HEAP_WASTE) if _is_heap(block, device) else total


def _is_heap(block: int, device: str) -> bool:
    return device == "cpu" and block < local.HEAP_BLOCK_BYTES
