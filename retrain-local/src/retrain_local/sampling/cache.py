"""What sampling holds besides the weights: the key-value pool, the owners of its blocks, and cached prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from retrain_local.decoder import Decoder
from retrain_local.memory import free_bytes
from retrain_local.sampling.blocks import Blocks
from retrain_local.sampling.pool import Pool, bytes_per_token
from retrain_local.sampling.prefix_cache import PrefixCache
from retrain_local.sampling.rows import Row
from retrain_local.sizes import BLOCK_SIZE, CACHE_BYTES_CPU, CACHE_SHARE_GPU


class Cache:
    """Keys and values of `tokens` tokens; on a CPU memory is committed when it is first written."""

    def __init__(self, decoder: Decoder, tokens: int, kind: str) -> None:
        self.tokens = tokens
        self.pool = Pool(
            decoder.shape,
            tokens=tokens,
            block_size=BLOCK_SIZE,
            kind=kind,
            dtype=decoder.dtype,
            device=decoder.device,
        )
        self.blocks = Blocks(self.pool.num_blocks - 1)
        self.prefixes = PrefixCache(self.blocks)


def budget_tokens(decoder: Decoder, kind: str, cache_bytes: int | None, *, is_copied: bool) -> int:
    """Tokens that a pool of `cache_bytes`, by default most of the free memory of the device, can hold.

    `is_copied`: half of it is for the copy that decoding in plain PyTorch reads.
    """
    if cache_bytes is None:
        cache_bytes = CACHE_BYTES_CPU
        if decoder.device.type == "cuda":
            cache_bytes = int(CACHE_SHARE_GPU * free_bytes(decoder.device))
    if is_copied:
        cache_bytes //= 2
    return max(BLOCK_SIZE, cache_bytes // bytes_per_token(decoder.shape, kind, decoder.dtype))


def enough_tokens(rows: Sequence[Row], pool_tokens: int, *, share: bool, keep_rows: bool) -> int:
    """Size of a pool in which these rows run at once to their full length, by way of the one there is.

    A pool that holds them stays as it is, since another one means recording every CUDA graph again. A new one has room
    for all rows at the length of the longest, and for the partial last block of each prompt: 128 rows of 256 + 1,024
    tokens of a 4B model take 24 GB where 80 % of a free H100 are 57. As groups share their prompts, that leaves room
    for the longer prompts of later steps. Rows of episodes grow from turn to turn: theirs is twice as large.
    """
    groups = Counter(row.prompt_key for row in rows)
    shared = {key: share and count > 1 for key, count in groups.items()}
    prompts = {row.prompt_key: len(row.prompt_T) - 1 for row in rows}
    needed = sum(_blocks(prompts[key]) for key in groups if shared[key])
    for row in rows:
        needed += _blocks(row.cached + row.room) - shared[row.prompt_key] * (prompts[row.prompt_key] // BLOCK_SIZE)
    if needed * BLOCK_SIZE <= pool_tokens:
        return pool_tokens
    longest = max(row.cached + row.room for row in rows)
    return (1 + keep_rows) * (len(rows) * _blocks(longest) + len(groups)) * BLOCK_SIZE


def _blocks(tokens: int) -> int:
    return -(-tokens // BLOCK_SIZE)
