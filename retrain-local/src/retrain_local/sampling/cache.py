"""Pool, owners of its blocks and rows kept in it: what sampling holds beside the weights."""

from __future__ import annotations

from retrain_local.decoder import Decoder
from retrain_local.memory import free_bytes
from retrain_local.sampling.blocks import Blocks
from retrain_local.sampling.kept import Kept
from retrain_local.sampling.pool import Pool, bytes_per_token
from retrain_local.sizes import BLOCK_SIZE, CACHE_BYTES_CPU, CACHE_SHARE_GPU


class Cache:
    """Keys and values of `tokens` tokens; the memory of a CPU is taken when it is first written."""

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
        self.kept = Kept(self.blocks)


def budget_tokens(decoder: Decoder, kind: str, cache_bytes: int | None, *, is_copied: bool) -> int:
    """Tokens for which a pool is made: of so many bytes, or of what the device has free at this moment.

    `is_copied`: half of that is for the copy that steps in plain PyTorch read.
    """
    if cache_bytes is None:
        cache_bytes = CACHE_BYTES_CPU
        if decoder.device.type == "cuda":
            cache_bytes = int(CACHE_SHARE_GPU * free_bytes(decoder.device))
    if is_copied:
        cache_bytes //= 2
    return max(BLOCK_SIZE, cache_bytes // bytes_per_token(decoder.shape, kind, decoder.dtype))
