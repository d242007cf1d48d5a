"""How the backend `local` uses memory: its own sizes, and what was measured where no size says it.

The kernel may not import that backend, so its sizes stand here again; a test holds them against the originals.
"""

from __future__ import annotations

# ---------------------------------------------------------------- sizes that the backend itself sets

TRAIN_TOKENS = {"cpu": 2048, "cuda": 16384}  # tokens of a micro-batch, padding included, unless the options say more
TRAIN_LOGITS = 2**29  # elements of a micro-batch's logits
LOSS_CHUNK = 2**24  # logits turned to fp32 at a time
DRAW_CHUNK = 2**25  # logits turned to fp64 at a time
PREFILL_TOKENS = 2**16  # prompt tokens read in one forward
SEGMENT = 8  # tokens drawn before anyone looks which rows have ended
CACHE_CHUNK = 64  # the key-value cache grows by this, or by half of itself
CACHE_BYTES_CPU = 2**32  # keys and values of all rows on the CPU
CACHE_SHARE_GPU = 0.6  # of what the weights leave free
MERGE_LIMIT = 2**28  # elements of adapted fp32 matrices up to which sampling has merged copies of its own
WEIGHT_BYTES = {"cpu": 4, "cuda": 2}  # fp32 and bf16
ADAPTER_BYTES = 4  # A, B, their gradients and both moments of AdamW are fp32

# ---------------------------------------------------------------- what was measured

MIB = 2**20
# Python, torch, transformers, peft and the model's modules in a process that has not sampled yet: CPU build of torch
# 2.13 on Linux. A past run or a pilot on the machine at hand takes its place.
RUNTIME_BYTES = {"cpu": 415 * MIB, "cuda": 600 * MIB}
# Bytes per element of logits while one token per row is drawn: fp32 logits, scaled, probabilities and entropies, and
# fp64 probabilities and their cumulative sum.
DRAW_BYTES = 32
# A sampled token on the host: token id, log-probability and entropy as Python numbers, then as arrays of rows, credit
# and records; the heap keeps about as much again.
HOST_TOKEN_BYTES = 2000
# glibc keeps blocks below 32 MiB in a heap that it cannot give back while anything behind them lives: within three
# steps resident memory settled at 1.3 to 2 times that of the living tensors. Larger blocks are mapped one by one and
# cost what they hold.
HEAP_BLOCK_BYTES = 32 * MIB
HEAP_WASTE = 1.8
HEAP_KEPT = 0.4  # of what training had in that heap, while the next step samples
PAGE_BYTES = 4096
