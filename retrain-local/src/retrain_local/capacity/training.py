"""Memory of an optimizer step: packs without padding, activations kept or recomputed, the head in chunks."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping

from retrain.api import MemoryPhase, TensorSize, Workload
from retrain_local import sizes
from retrain_local.capacity.shape import ModelShape
from retrain_local.cpu_packs import plan_cpu_packs

THREADS = "OMP_NUM_THREADS"  # what PyTorch takes its number of threads from


def activation_elements(shape: ModelShape, *, recompute: bool, device: str = "cuda") -> int:
    """Elements that one token of a pack occupies until the backward pass and in it, as in the backend's own plan.

    A layer: six vectors of the hidden size, queries four times and keys and values twice, four vectors of the inner
    size. With `recompute` every layer keeps its input, and one layer at a time the rest. The head keeps four vectors.
    Without it a CPU keeps two vectors of the hidden size and one of the inner size less.
    """
    attention = 4 * shape.heads * shape.head_size + 2 * shape.kv_heads * shape.head_size
    inner = shape.inner * max(1, shape.active_experts)
    layer = 6 * shape.hidden + attention + 4 * inner
    spared = 2 * shape.hidden + inner if device == "cpu" and not recompute else 0
    kept = shape.layers * shape.hidden + 2 * layer if recompute else (shape.layers + 1) * (layer - spared)
    return kept + 4 * shape.hidden


def packs_at_a_time(shape: ModelShape, work: Workload) -> int:
    """How many packs are computed in parallel."""
    if work.device != "cpu":
        return 1
    cores, asked = os.cpu_count() or 1, os.environ.get(THREADS, "")
    if shape.parameters < sizes.ONE_THREAD_BELOW:
        return min(sizes.PACKS_AT_A_TIME, cores)
    return min(sizes.MOST_PACKS_AT_A_TIME, cores, int(asked) if asked.isdecimal() and int(asked) else cores)


def pack_tokens(shape: ModelShape, work: Workload, room_bytes: int | None) -> tuple[int, bool]:
    """Tokens that a pack may hold, and whether activations are recomputed; `room_bytes` None = unknown."""
    element = sizes.weight_bytes(work.device, work.model_dtype)
    if work.device == "cpu":
        return _cpu_pack_tokens(shape, work, room_bytes)
    room = math.inf if room_bytes is None else int(sizes.ACTIVATION_SHARE_GPU * room_bytes)
    plain = room / (activation_elements(shape, recompute=False) * element)
    asked = work.gradient_checkpointing
    recompute = asked == "on" or (asked == "auto" and plain < sizes.FULL_SPEED_TOKENS)
    fitting = room / (activation_elements(shape, recompute=recompute) * element)
    tokens = work.micro_batch_tokens or max(1, int(min(sizes.TOKEN_BUDGET[work.device], fitting)))
    largest = max(tokens, work.prompt_tokens + work.max_tokens - 1)  # a longer row than fits is recomputed
    return tokens, recompute or (asked == "auto" and plain < largest)


def _cpu_pack_tokens(shape: ModelShape, work: Workload, room_bytes: int | None) -> tuple[int, bool]:
    element = sizes.weight_bytes(work.device, work.model_dtype)
    plan = plan_cpu_packs(
        activation_elements(shape, recompute=False, device="cpu") * element,
        activation_elements(shape, recompute=True, device="cpu") * element,
        math.inf if room_bytes is None else room_bytes,
        asked=work.gradient_checkpointing,
        at_a_time=packs_at_a_time(shape, work),
        prompt=work.prompt_tokens,
        context=shape.context,
    )
    tokens = work.micro_batch_tokens or plan.tokens
    largest = max(tokens, work.prompt_tokens + work.max_tokens - 1)
    return tokens, plan.recompute or 0 < plan.kept_tokens < largest


def _gradient_elements(shape: ModelShape, rank: int, at_a_time: int, is_summed: bool) -> int:
    """Of the packs computed in parallel, and of all weights also their sum; the head's is summed from chunks.

    The gradient of the first pack becomes the sum, so there is none beside it until more packs follow.
    """
    if rank:
        return at_a_time * shape.lora_parameters(rank)
    head = 2 * shape.vocabulary * shape.hidden
    return (at_a_time + is_summed) * shape.parameters + at_a_time * head


def training_phase(
    shape: ModelShape, work: Workload, budget: int, *, recompute: bool, resident: Mapping[str, int]
) -> MemoryPhase:
    """The largest packs of the step, as many as run in parallel, with the gradients of the adapter."""
    element = sizes.weight_bytes(work.device, work.model_dtype)
    own = max(1, work.max_tokens - 1)  # the last token predicts nothing
    row, group = work.prompt_tokens + own, work.prompt_tokens + work.group_size * own
    total = work.batch_size * group
    tokens = min(max(budget, row), total)
    at_a_time = min(packs_at_a_time(shape, work), math.ceil(total / tokens))
    inner = tokens * shape.inner * element
    waste = 1.0
    if sizes.is_on_heap(inner, work.device):
        waste = sizes.HEAP_WASTE_AGAIN if recompute else sizes.HEAP_WASTE
    each = activation_elements(shape, recompute=recompute, device=work.device) * element
    living = min(at_a_time * tokens, total) * each
    gradients = _gradient_elements(shape, work.lora_rank, at_a_time, is_summed=total > at_a_time * tokens)
    actions = min(work.completions * work.max_tokens, tokens)
    logits = min(actions * shape.vocabulary, max(shape.vocabulary, sizes.LOGIT_CHUNK[work.device]))
    parts = {
        "activations": int(living * waste),
        "logits": at_a_time * logits * sizes.LOGIT_BYTES[element],
        "gradients": gradients * sizes.ADAPTER_BYTES,
    }
    if work.device == "cpu":
        parts["scratch"] = at_a_time * sizes.SCRATCH_BYTES
    tensors = (
        TensorSize(name="logits", shape=(max(1, logits // shape.vocabulary), shape.vocabulary), bytes=logits * 4),
        TensorSize(name="activations of a layer", shape=(tokens, 2 * shape.inner), bytes=2 * inner),
        shape.embedding(element),
    )
    return MemoryPhase(
        name="training",
        resident=resident,
        parts=parts,
        biggest=max(tensors, key=lambda tensor: tensor.bytes),
        block_bytes=inner,
    )
