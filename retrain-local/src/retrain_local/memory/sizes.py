"""Sizes that decide how much memory backend `local` takes, shared by the backend and its estimate."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")

# ---------------------------------------------------------------- set by the backend

BLOCK_SIZE = 16  # tokens of a block of keys and values
SCALE_BYTES = 4
CACHE_BYTES_CPU = 2**32  # half of it the pool, half the copy that a segment reads
CACHE_SHARE_GPU = 0.8  # of the free memory before the first step
MEASURED_ROW = 256  # tokens of a row whose activations are measured: the largest chunk of common scans
PREFILL_TOKENS = 2**13  # prompt tokens read in one forward
DRAW_CHUNK = 2**25  # logits turned to probabilities at a time
TOKEN_BUDGET = {"cpu": 1536, "cuda": 65536}  # tokens of a pack, unless the options say more
# On a GPU a smaller pack is not worth keeping all activations for. Computing them again costs 2 W operations a token
# on top of 4 W. A product with a matrix of 2,560 outputs is 160 tiles of 128 x 256 for 2,048 tokens and 240 for 3,072:
# 61 and 91 % of two rounds of 132 multiprocessors. Reading a weight takes as long as 300 tokens' products with it.
FULL_SPEED_TOKENS = 3072
FULL_SPEED_TOKENS_CPU = 384  # from here on a CPU multiplies no faster
# Of all packs computed at a time, unless these get too small. Two rows of SmolLM2 with 306 tokens share a pack, and
# their prompt of 51: 8 % fewer tokens than with a row in each.
ACTIVATION_BYTES_CPU = 3 * 2**29
# Share of the free memory before the first step. Activations that need more are recomputed.
ACTIVATION_SHARE_CPU = 0.5
# Each pack computes the prompt again, so a pack on a CPU holds this many times the longest prompt.
PROMPTS_PER_PACK = 4
ACTIVATION_SHARE_GPU = 0.7  # of the free memory before the first step
# Parameters of a small model: on a CPU two of its packs are computed at a time.
ONE_THREAD_BELOW = 10_000_000
# Two for a small model on any machine, so that its results are the same everywhere; a pack per core for a larger one.
PACKS_AT_A_TIME, MOST_PACKS_AT_A_TIME = 2, 8
LOGIT_CHUNK = {"cpu": 2**22, "cuda": 2**26}  # logits of a step's action tokens held at a time
# A fused softmax leaves 4 bytes each in bf16, less than the LOGIT_BYTES of a plain chunk.
FUSED_CHUNK = 2**27
MERGE_LIMIT = 2**28  # elements of adapted fp32 matrices up to which sampling has its own merged copies
# Elements of a matrix that a CPU keeps in the layout of its product. Of smaller ones the call costs more than it saves.
PREPACK_FROM = 2**18
AUTO_DTYPE = {"cpu": "fp32", "cuda": "bf16"}  # [model] dtype = "auto"
DTYPE_BYTES = {"fp32": 4, "bf16": 2}
ADAPTER_BYTES = 4  # A, B, their gradients and both moments of AdamW are fp32, as are weights that are trained
QUANTISED_BYTES = {"nf4": 0.5625, "int8": 1.0}  # of a frozen number: 4 bits and a scale for every 64; 8 bits
FULL_CHECKPOINT_BYTES = 14  # of a trained weight: bf16 for users, the fp32 number itself, both moments

# ---------------------------------------------------------------- measured, for the estimate

MIB = 2**20
# Python, torch and tokenizers in a process that has not sampled yet: CPU build of torch 2.13 on Linux. A past run or a
# pilot on the machine at hand takes its place. Other architectures than these need transformers' modules and PEFT.
RUNTIME_BYTES = {"cpu": 265 * MIB, "cuda": 600 * MIB}
HOSTED_BYTES = {"cpu": 220 * MIB, "cuda": 0}
NATIVE = frozenset({"llama", "qwen2", "qwen3", "mistral"})
# Bytes per element of logits while one token per row is drawn: fp32 logits, log-probabilities, probabilities and
# entropies.
DRAW_BYTES = 16
# Bytes per element of a chunk of logits in training, with its gradient, by the bytes of a weight: two fp32 pieces; in
# bf16 two bf16 pieces on top.
LOGIT_BYTES = {4: 8, 2: 12}
# A sampled token on the host: token id, log-probability and entropy as Python numbers, then as arrays of rows, credit
# and records; the heap keeps about as much again.
HOST_TOKEN_BYTES = 2000
# glibc keeps blocks below 32 MiB in a heap that it cannot give back while anything behind them lives: within three
# steps resident memory settled at 1.05 to 1.15 times the living tensors, and at 1.4 to 1.6 where layers are computed
# again between those that are kept. Larger blocks are mapped one by one and cost their size.
HEAP_BLOCK_BYTES = 32 * MIB
HEAP_WASTE, HEAP_WASTE_AGAIN = 1.1, 1.6
# Of transformers' modules 1.1 to 1.3 times with up to two packs a thread in a step, 1.3 to 2.4 with more (seven types
# of 30 to 40 M weights): before glibc 2.38 an aligned block does not fit where one of its size was freed.
HEAP_WASTE_FEW, HEAP_WASTE_HOSTED = 1.3, 2.0
HEAP_KEPT = 0.6  # of what training of a small model had in that heap, while the next step samples
COPY_WASTE = 1.5  # of the copy that a segment reads: blocks that grow leave holes behind
SCRATCH_BYTES = 20 * MIB  # of matrix products and the backward pass, for each pack that is computed at a time


def token_bytes(layers: int, kv_heads: int, sizes: int, stored_bytes: int) -> int:
    """Return the bytes of one token's keys and values; `sizes`: of a key and a value together."""
    # 8-bit storage has one fp32 scale per vector, of the key and of the value
    return layers * kv_heads * (sizes * stored_bytes + (2 * SCALE_BYTES if stored_bytes == 1 else 0))


def weight_bytes(device: str, dtype: str) -> int:
    return DTYPE_BYTES[AUTO_DTYPE[device] if dtype == "auto" else dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """The longest row and the longest shared prefix of a step, and the tokens of all rows over those of their packs."""

    longest: int | None = None
    prompt: int = 0
    repeats: float = 1.0


ALIKE = Rows()


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """The elements that a token occupies until the backward pass, measured (see `model.activations`).

    `packed` are those of layers that read packs. Of layers that read whole rows, `repeated`, each row of a group has a
    shared prompt again. `largest` is the layer that has most. A row of `row` tokens was measured; each further token of
    a row adds `slope`.
    """

    packed: int
    repeated: int
    largest: int
    row: int
    slope: float

    def of(self, rows: Rows, *, recompute: bool, inputs: int) -> int:
        """Return the elements, with `recompute` the `inputs` of all layers and one layer, in the backward pass."""
        # Chunks are padded: rows shorter than one have more elements a token, longer ones not fewer.
        more = (rows.longest or self.row) - self.row
        kept = self.packed + rows.repeats * self.repeated + (self.slope if more < 0 else max(0.0, self.slope)) * more
        largest = self.largest * kept / (self.packed + self.repeated)
        return int(inputs + 2 * largest if recompute else kept + largest)


def activation_elements(
    layers: int,
    *,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    recompute: bool,
    device: str = "cuda",
    is_fused: bool = False,
    measured: Activations | None = None,
    rows: Rows = ALIKE,
) -> int:
    """Return the elements that one token of a pack occupies until the backward pass, and in it.

    Without `measured`, of this backend's own decoder: a layer keeps its input twice (before and after the norm, again
    around the feed-forward part), queries, keys and values before and after their rotation, the output of attention,
    gate, up and their product. With `recompute` a layer keeps only its input, and one layer at a time the rest. The
    head keeps a vector of the hidden size. Without recomputation neither a CPU nor fused kernels keep normed inputs and
    gated products. `is_fused`: the kernels of `model.fused` compute between the products.
    """
    if measured:
        return measured.of(rows, recompute=recompute, inputs=layers * hidden) + 4 * hidden
    if is_fused:
        # Flash attention reads a copy of keys and values in which every row has its shared prompt.
        vectors = 3 * heads + 3 * kv_heads + rows.repeats * 2 * kv_heads
        layer, remade = int(2 * hidden + vectors * head_size + 2 * inner), 2 * hidden + inner
        # In the backward pass live the gradients of the gated product and of its two inputs. Of a recomputed layer two
        # vectors of the inner size are gone by then.
        kept = layers * hidden + layer + remade + inner if recompute else layers * layer + 3 * inner
        return kept + 4 * hidden
    layer = 6 * hidden + (4 * heads + 2 * kv_heads) * head_size + 3 * inner
    spared = 2 * hidden + inner if device == "cpu" and not recompute else 0
    kept = layers * hidden + 2 * layer if recompute else (layers + 1) * (layer - spared)
    return kept + 4 * hidden


def is_on_heap(block_bytes: int, device: str) -> bool:
    """True if blocks of this size come from the C library's heap, see `HEAP_BLOCK_BYTES`."""
    return device == "cpu" and block_bytes < HEAP_BLOCK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class PackPlan:
    """Maximum tokens of a pack, and True if its activations are recomputed in the backward pass.

    A row of more than `kept_tokens` is recomputed in any case; 0 = no such limit.
    """

    tokens: int
    recompute: bool
    kept_tokens: int = 0


def plan_cpu_packs(
    kept: int,
    recomputed: int,
    free_bytes: float,
    *,
    checkpointing: str,
    at_a_time: int,
    prompt: int,
    context: int | None,
) -> PackPlan:
    """Plan packs on a CPU: activations are kept where packs of full speed fit into half of the free memory.

    `kept` and `recomputed` are the bytes of a token either way, `checkpointing` is `gradient_checkpointing`, `prompt`
    the length of the longest prompt, `context` the longest possible row, if known. A pack is no larger than full speed
    needs, to keep memory low, unless the prompt would be most of it. The limit of a row is a power of two:
    checkpoints hold it, and two runs seldom find the same memory free.
    """
    room, is_auto = ACTIVATION_SHARE_CPU * free_bytes / at_a_time, checkpointing == "auto"
    recompute = checkpointing == "on" or (is_auto and FULL_SPEED_TOKENS_CPU * kept > room)
    each = recomputed if recompute else kept
    wanted = max(ACTIVATION_BYTES_CPU // at_a_time // each, FULL_SPEED_TOKENS_CPU, PROMPTS_PER_PACK * prompt)
    tokens = max(1, int(min(TOKEN_BUDGET["cpu"], wanted, room / each)))
    limit = room / kept if is_auto and not recompute else math.inf
    limit = 0 if limit >= (context or math.inf) else max(tokens, 2 ** int(math.log2(limit)))
    return PackPlan(tokens=tokens, recompute=recompute, kept_tokens=limit)


def plan_gpu_packs(kept: int, recomputed: int, free_bytes: float, *, checkpointing: str) -> PackPlan:
    """Plan packs on a GPU: activations are kept where packs of full speed fit. Arguments as above."""
    room, is_auto = ACTIVATION_SHARE_GPU * free_bytes, checkpointing == "auto"
    recompute = checkpointing == "on" or (is_auto and room / kept < FULL_SPEED_TOKENS)
    tokens = max(1, int(min(TOKEN_BUDGET["cuda"], room / (recomputed if recompute else kept))))
    has_limit = is_auto and not recompute and room < math.inf
    return PackPlan(tokens=tokens, recompute=recompute, kept_tokens=int(room / kept) if has_limit else 0)


def runs(items: Iterable[T], most: float, size: Callable[[T], float]) -> Iterator[list[T]]:
    """Yield runs of items with sizes of at most `most` together, or one larger item."""
    run: list[T] = []
    total = 0.0
    for item in items:
        total += size(item)
        if run and total > most:
            yield run
            run, total = [], size(item)
        run.append(item)
    if run:
        yield run
