"""What sampling holds besides the weights: the key-value pool, the owners of its blocks, and cached prefixes."""

from __future__ import annotations

from retrain_local.decoder import Decoder
from retrain_local.memory import free_bytes
from retrain_local.sampling.blocks import Blocks
from retrain_local.sampling.pool import Pool, bytes_per_token
from retrain_local.sampling.prefix_cache import PrefixCache
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
