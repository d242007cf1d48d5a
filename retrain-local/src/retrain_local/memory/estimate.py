"""Peak memory of a run on the backend `local`, phase by phase, from sizes only: weights, sampling, optimizer step.

Sampling has a cache of blocks with one copy of each prompt, and a batch of as many rows as fit it. An optimizer step
has packs without padding, activations kept or recomputed, and the head in chunks.
"""

from __future__ import annotations

import math
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace

from retrain.api import MemoryEstimate, MemoryPhase, TensorSize, Workload
from retrain_local.memory import sizes
from retrain_local.memory.shape import ModelShape


def estimate(
    shape: ModelShape,
    work: Workload,
    *,
    runtime_bytes: int | None = None,
    device_bytes: int | None = None,
    others: Mapping[str, ModelShape] | None = None,
) -> MemoryEstimate:
    """Estimate the peak if every completion reaches `max_tokens`, with the weights of `others` next to the model.

    A measured `runtime_bytes` replaces the need of an empty process. `device_bytes` is the memory of the GPU, if any.
    """
    runtime = runtime_bytes
    if runtime is None:
        runtime = sizes.RUNTIME_BYTES[work.device] + (0 if shape.is_native else sizes.HOSTED_BYTES[work.device])
    apart = bool(work.samplers)
    trainer = {"runtime": runtime} | _trained(shape, work)
    element = sizes.weight_bytes(work.device, work.model_dtype)
    trainer |= {name: _frozen(other, work, element) for name, other in (others or {}).items()}
    sampler = {"runtime": runtime} | _sampled(shape, work, is_apart=apart)
    if not (apart and work.device == "cuda"):
        trainer = sampler = trainer | sampler
    tokens, recompute = pack_tokens(shape, work, _free(device_bytes, trainer))
    pool = cache_budget(work, _free(device_bytes, sampler))
    sampling = sampling_phase(shape, work, pool, resident=sampler)
    # What a small model's heap keeps of training, below, has room for its pool.
    is_small = shape.parameters < sizes.ONE_THREAD_BELOW
    if work.device == "cpu" and not (work.is_served or apart or is_small):
        trainer = trainer | {name: sampling.parts[name] for name in ("kv_cache", "states") if name in sampling.parts}
    training = training_phase(shape, work, tokens, recompute=recompute, resident=trainer)
    if work.device == "cpu":
        # in split mode both phases run at once
        is_kept = is_small and sizes.is_on_heap(training.block_bytes, work.device)
        kept = int(sizes.HEAP_KEPT * training.parts["activations"]) if is_kept else 0
        phases: tuple[MemoryPhase, ...] = (replace(sampling, parts={**sampling.parts, "heap_kept": kept}), training)
        if work.samplers:
            phases = (training.together_with(sampling, name="both at once"),)
        phases = (training,) if work.is_served else phases
        needed = max(phase.peak_bytes for phase in phases)
    else:
        phases = (training,) if work.is_served else (sampling, training)
        again = work.gradient_checkpointing != "off"
        least = [training_phase(shape, work, work.micro_batch_tokens or 1, recompute=again, resident=trainer)]
        if not work.is_served:
            least.append(sampling_phase(shape, work, work.cache_bytes or 1, resident=sampler))
        needed = max(phase.peak_bytes for phase in least)
    return MemoryEstimate(phases=phases, pack_tokens=tokens, at_once=sampling.at_once, needed_bytes=needed)


def _free(device_bytes: int | None, resident: Mapping[str, int]) -> int | None:
    # before the first step the optimizer has no moments
    if device_bytes is None:
        return None
    return max(0, device_bytes - sum(size for name, size in resident.items() if name != "optimizer"))


def _trained(shape: ModelShape, work: Workload) -> dict[str, int]:
    """Return the base model, the adapter with its moments, and on a CPU the host's records of every sampled token."""
    # without an adapter the weights are trained in fp32, whatever the dtype of computation
    adapter = shape.lora_parameters(work.lora_rank) * sizes.ADAPTER_BYTES
    element = sizes.weight_bytes(work.device, work.model_dtype) if work.lora_rank else sizes.ADAPTER_BYTES
    weights = _frozen(shape, work, element)
    parts = {"weights": weights, "adapter": adapter, "optimizer": 2 * (adapter if work.lora_rank else weights)}
    if work.device == "cpu":
        parts["host"] = work.most_sampled * work.max_tokens * sizes.HOST_TOKEN_BYTES
    return parts


def _frozen(shape: ModelShape, work: Workload, element: int) -> int:
    """Return all weights, `element` bytes each, with the adapted matrices in fewer bits where they are quantised."""
    spared = element - sizes.QUANTISED_BYTES.get(work.quantize, element)
    return shape.parameters * element - int(shape.adapted_elements * spared)


def _sampled(shape: ModelShape, work: Workload, *, is_apart: bool) -> dict[str, int]:
    """Return the sampler's memory without frozen weights that it shares (same device, same dtype)."""
    if work.is_served:
        return {}
    trained = sizes.weight_bytes(work.device, work.model_dtype)
    element = 2 if work.dtype == "bf16" else trained
    if not work.lora_rank:
        return {"sampler": (shape.parameters + _prepacked(shape, work.device)) * element}
    # A small model is sampled from an expanded copy, see `model.llama`.
    if work.quantize in sizes.QUANTISED_BYTES:
        is_copied = shape.adapted_elements <= sizes.MERGE_LIMIT
        adapter = shape.sampler_adapter_elements(work.lora_rank) * element
        return {"sampler": adapter + (is_copied * shape.adapted_elements + _prepacked(shape, work.device)) * element}
    is_merged = element == trained == 4 and shape.adapted_elements <= sizes.MERGE_LIMIT
    if is_merged:
        own = shape.adapted_elements * element
    else:
        adapter = shape.sampler_adapter_elements(work.lora_rank) * trained
        own = adapter + (shape.adapted_elements * element if element != trained else 0)
    own += _prepacked(shape, work.device, is_merged=is_merged) * element
    return {"sampler": own + (shape.parameters * trained if is_apart else 0)}


def _prepacked(shape: ModelShape, device: str, *, is_merged: bool = False) -> int:
    """Return the elements of the head that a CPU holds again in the layout of its product, for small models."""
    head = shape.vocabulary * shape.hidden
    is_copied = device == "cpu" and (shape.is_native or is_merged) and head >= sizes.PREPACK_FROM
    return head if is_copied and shape.adapted_elements <= sizes.MERGE_LIMIT else 0


STORED_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}


def bytes_per_token(shape: ModelShape, work: Workload) -> int:
    computed = 2 if work.dtype == "bf16" else sizes.weight_bytes(work.device, work.model_dtype)
    stored = STORED_BYTES.get(work.kv_cache_dtype, computed)
    if shape.kept:
        return shape.token_elements * stored
    return sizes.token_bytes(shape.layers, shape.kv_heads, 2 * shape.head_size, stored)


def cache_budget(work: Workload, free_bytes: int | None) -> int:
    if work.cache_bytes:
        return work.cache_bytes // (2 if work.device == "cpu" else 1)
    if work.device == "cpu":
        return sizes.CACHE_BYTES_CPU // 2
    return 0 if free_bytes is None else max(1, int(sizes.CACHE_SHARE_GPU * free_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Blocks of rows of full length: of each group's prompt, if prompts are shared, and the others of each row."""

    group: int
    of_prompt: int
    of_row: int

    @classmethod
    def needed(cls, work: Workload) -> Blocks:
        whole = work.prompt_tokens // sizes.BLOCK_SIZE if work.is_sharing else 0
        return cls(
            group=work.group_size,
            of_prompt=math.ceil(work.prompt_tokens / sizes.BLOCK_SIZE) if work.is_sharing else 0,
            of_row=row_blocks(work) - whole,
        )

    def of(self, rows: int) -> int:
        return rows * self.of_row + math.ceil(rows / self.group) * self.of_prompt


def row_blocks(work: Workload) -> int:
    return math.ceil((work.prompt_tokens + work.max_tokens) / sizes.BLOCK_SIZE)


def sampling_phase(shape: ModelShape, work: Workload, pool_bytes: int, *, resident: Mapping[str, int]) -> MemoryPhase:
    element = sizes.weight_bytes(work.device, work.model_dtype)
    per_block = bytes_per_token(shape, work) * sizes.BLOCK_SIZE
    devices, is_cpu = max(1, work.samplers), work.device == "cpu"
    wanted = math.ceil(work.most_sampled / devices)
    needed = Blocks.needed(work)
    pool = max(needed.of(1), pool_bytes // max(1, per_block)) if pool_bytes else needed.of(wanted)
    # As large as all rows of a step need, see `retrain_local.sampling.schedule.enough_tokens`.
    if not is_cpu:
        pool = min(pool, wanted * row_blocks(work) + math.ceil(wanted / work.group_size))
    rows = max(1, bisect_right(range(1, wanted + 1), pool, key=needed.of))
    # Plain PyTorch reads a contiguous copy of all rows. It is at most as large as the cache.
    if is_cpu:
        rows = max(1, min(rows, pool // row_blocks(work)))
    # A CPU commits memory when it is first written, a GPU when the pool is allocated.
    held = min(pool, needed.of(rows)) if is_cpu else pool
    prefill = min(work.batch_size * work.prompt_tokens, max(sizes.PREFILL_TOKENS, work.prompt_tokens))
    wide = max(rows, prefill) * (3 * shape.inner + 4 * shape.hidden) * element
    chunk = min(rows * shape.vocabulary, max(sizes.DRAW_CHUNK, shape.vocabulary))
    parts = {
        "kv_cache": held * per_block,
        "activations": wide,
        "draw": chunk * sizes.DRAW_BYTES + rows * shape.vocabulary * element,
    }
    if is_cpu:
        plain = shape.token_elements * element * sizes.BLOCK_SIZE
        parts["kv_copy"] = int(rows * row_blocks(work) * plain * sizes.COPY_WASTE)
    if shape.row_bytes:  # of every row and every shared prompt, and of the copy that a segment works on
        parts["states"] = (rows + math.ceil(rows / work.group_size)) * shape.row_bytes
        parts["state_copy"] = rows * shape.row_bytes
    keys = (held, sizes.BLOCK_SIZE, shape.kv_heads, shape.head_size)
    tensors = (
        TensorSize(name="keys of a layer", shape=keys, bytes=held * per_block // (2 * shape.layers)),
        TensorSize(name="logits", shape=(rows, shape.vocabulary), bytes=rows * shape.vocabulary * element),
        shape.embedding(element),
    )
    return MemoryPhase(
        name="sampling",
        resident=resident,
        parts=parts,
        biggest=max(tensors, key=lambda tensor: tensor.bytes),
        at_once=rows * devices,
    )


def activation_elements(shape: ModelShape, work: Workload, *, recompute: bool) -> int:
    """Return the elements that one token of a pack occupies, as in the backend's own plan."""
    row, own = work.prompt_tokens + work.max_tokens - 1, work.max_tokens - 1
    repeats = work.group_size * row / (work.prompt_tokens + work.group_size * own)
    return sizes.activation_elements(
        shape.layers,
        hidden=shape.hidden,
        inner=shape.inner * max(1, shape.active_experts),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        recompute=recompute,
        device=work.device,
        is_fused=work.device == "cuda" and shape.is_native and work.lora_rank > 0,
        measured=shape.kept.activations if shape.kept else None,
        rows=sizes.Rows(longest=row, repeats=repeats),
    )


def packs_at_a_time(shape: ModelShape, work: Workload) -> int:
    if work.device != "cpu":
        return 1
    cores, threads = os.cpu_count() or 1, os.environ.get("OMP_NUM_THREADS", "")  # read by PyTorch
    if shape.parameters < sizes.ONE_THREAD_BELOW:
        return min(sizes.PACKS_AT_A_TIME, cores)
    return min(sizes.MOST_PACKS_AT_A_TIME, cores, int(threads) if threads.isdecimal() and int(threads) else cores)


def pack_tokens(shape: ModelShape, work: Workload, room_bytes: int | None) -> tuple[int, bool]:
    """Return the tokens that a pack may hold, and True if activations are recomputed; `room_bytes` None = unknown."""
    element = sizes.weight_bytes(work.device, work.model_dtype)
    kept, recomputed = (activation_elements(shape, work, recompute=again) * element for again in (False, True))
    free, option = math.inf if room_bytes is None else room_bytes, work.gradient_checkpointing
    if work.device == "cpu":
        given = {"prompt": work.prompt_tokens, "at_a_time": packs_at_a_time(shape, work)}
        plan = sizes.plan_cpu_packs(kept, recomputed, free, checkpointing=option, context=shape.context, **given)
    else:
        plan = sizes.plan_gpu_packs(kept, recomputed, free, checkpointing=option)
    tokens = work.micro_batch_tokens or plan.tokens
    # A longer row than fits is recomputed. The last token predicts nothing, so it is not part of a row.
    longest_row = work.prompt_tokens + work.max_tokens - 1
    return tokens, plan.recompute or 0 < plan.kept_tokens < max(tokens, longest_row)


def _gradient_elements(shape: ModelShape, rank: int, at_a_time: int, is_summed: bool) -> int:
    """Return the gradients of the packs computed in parallel, and for all weights also their sum."""
    # the first pack's gradient becomes the sum: it is separate only when more packs follow; the head's is of chunks
    if rank:
        return at_a_time * shape.lora_parameters(rank)
    head = 2 * shape.vocabulary * shape.hidden
    return (at_a_time + is_summed) * shape.parameters + at_a_time * head


def training_phase(
    shape: ModelShape, work: Workload, budget: int, *, recompute: bool, resident: Mapping[str, int]
) -> MemoryPhase:
    element = sizes.weight_bytes(work.device, work.model_dtype)
    own = max(1, work.max_tokens - 1)  # the last token predicts nothing
    row, group = work.prompt_tokens + own, work.prompt_tokens + work.group_size * own
    total = work.batch_size * group
    groups, rest = divmod(min(max(budget, row), total), group)
    rows = max(0, rest - work.prompt_tokens) // own  # of a group that does not fit as a whole
    tokens = groups * group + (work.prompt_tokens + rows * own if rows else 0)
    at_a_time = min(packs_at_a_time(shape, work), math.ceil(total / tokens))
    inner = tokens * shape.inner * element
    waste = 1.0
    if sizes.is_on_heap(inner, work.device):
        waste = sizes.HEAP_WASTE_AGAIN if recompute else sizes.HEAP_WASTE
        if shape.kept:
            is_few = total <= 2 * at_a_time * tokens
            waste = sizes.HEAP_WASTE_FEW if is_few else sizes.HEAP_WASTE_HOSTED
    each = activation_elements(shape, work, recompute=recompute) * element
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
