"""Memory of sampling: a cache of blocks with one copy of each prompt, and a batch of as many rows as fit it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from retrain.api import MemoryPhase, TensorSize, Workload
from retrain_local import sizes
from retrain_local.capacity.shape import ModelShape

STORED_BYTES = {"bf16": 2, "fp8": 1, "int8": 1}
SCALE_BYTES = 4


def bytes_per_token(shape: ModelShape, work: Workload) -> int:
    """Bytes of a token's keys and values in all layers; 8-bit ones have a scale per head."""
    computed = 2 if work.dtype in ("bf16", "fp8") else sizes.weight_bytes(work.device, work.model_dtype)
    stored = STORED_BYTES.get(work.kv_cache_dtype, computed)
    vectors = 2 * shape.head_size * stored + (2 * SCALE_BYTES if stored == 1 else 0)
    return shape.layers * shape.kv_heads * vectors


def cache_budget(work: Workload, free_bytes: int | None) -> int:
    """Bytes of the pool, 0 = unknown; `free_bytes` is what everything else on the device leaves free."""
    if work.cache_bytes:
        return work.cache_bytes // (2 if work.device == "cpu" else 1)
    if work.device == "cpu":
        return sizes.CACHE_BYTES_CPU // 2
    return 0 if free_bytes is None else max(1, int(sizes.CACHE_SHARE_GPU * free_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """Number of blocks needed by rows of full length.

    Each group needs the blocks of its prompt, if prompts are shared, and each row those that it does not share.
    """

    group: int
    of_prompt: int
    of_row: int

    @classmethod
    def needed(cls, work: Workload) -> Blocks:
        """The blocks for the rows of a step."""
        whole = work.prompt_tokens // sizes.BLOCK_SIZE if work.is_sharing else 0
        return cls(
            group=work.group_size,
            of_prompt=math.ceil(work.prompt_tokens / sizes.BLOCK_SIZE) if work.is_sharing else 0,
            of_row=row_blocks(work) - whole,
        )

    def of(self, rows: int) -> int:
        """Blocks of the first `rows` rows, group by group."""
        return rows * self.of_row + math.ceil(rows / self.group) * self.of_prompt

    def rows_in(self, blocks: int, most: int) -> int:
        """The most rows, from one to `most`, that fit into `blocks`."""
        low, high = 1, most
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if self.of(middle) <= blocks else (low, middle - 1)
        return low


def row_blocks(work: Workload) -> int:
    """Blocks of a row of full length."""
    return math.ceil((work.prompt_tokens + work.max_tokens) / sizes.BLOCK_SIZE)


def sampling_phase(shape: ModelShape, work: Workload, pool_bytes: int, *, resident: Mapping[str, int]) -> MemoryPhase:
    """All rows at full length, as many at a time as fit the cache; one always does."""
    element, per_block = (
        sizes.weight_bytes(work.device, work.model_dtype),
        bytes_per_token(shape, work) * sizes.BLOCK_SIZE,
    )
    devices, is_cpu = max(1, work.samplers), work.device == "cpu"
    wanted = math.ceil(work.most_sampled / devices)
    needed = Blocks.needed(work)
    pool = max(needed.of(1), pool_bytes // per_block) if pool_bytes else needed.of(wanted)
    if not is_cpu:  # as large as all rows of a step need, see `retrain_local.sampling.cache.enough_tokens`
        pool = min(pool, wanted * row_blocks(work) + math.ceil(wanted / work.group_size))
    rows = needed.rows_in(pool, wanted)
    if is_cpu:  # plain PyTorch reads a contiguous copy of all rows, at most as large as the cache
        rows = max(1, min(rows, pool // row_blocks(work)))
    held = min(pool, needed.of(rows)) if is_cpu else pool  # on a CPU memory is allocated when it is first written
    prefill = min(work.batch_size * work.prompt_tokens, max(sizes.PREFILL_TOKENS, work.prompt_tokens))
    wide = max(rows, prefill) * (3 * shape.inner + 4 * shape.hidden) * element
    drawn = min(rows * shape.vocabulary, max(sizes.DRAW_CHUNK, shape.vocabulary))
    parts = {
        "kv_cache": held * per_block,
        "activations": wide,
        "draw": drawn * sizes.DRAW_BYTES + rows * shape.vocabulary * element,
    }
    if is_cpu:
        plain = 2 * shape.layers * shape.kv_heads * shape.head_size * element * sizes.BLOCK_SIZE
        parts["kv_copy"] = int(rows * row_blocks(work) * plain * sizes.COPY_WASTE)
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
