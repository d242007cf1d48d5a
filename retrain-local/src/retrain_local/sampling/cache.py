"""What sampling holds besides the weights: pool, owners of its blocks, and finished rows kept for their prefixes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from retrain.api import Tokens
from retrain_local.decoder import Decoder
from retrain_local.memory.limits import free_bytes
from retrain_local.memory.sizes import BLOCK_SIZE, CACHE_BYTES_CPU, CACHE_SHARE_GPU
from retrain_local.sampling.pool import Blocks, Pool, bytes_per_token
from retrain_local.sampling.rows import Row

KEPT_ROWS = 256  # of earlier calls: enough for the conversations of many agents that are busy with their tools
TAIL = 16  # trailing tokens of a prefix that serve as its lookup key


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prefix:
    """Tokens, and the blocks with the keys and values of all but the last."""

    tokens_T: Tokens
    blocks: list[int]

    @property
    def cached(self) -> int:
        """Tokens with keys and values."""
        return len(self.tokens_T) - 1


class PrefixCache:
    """Finished rows, prompt and completion, until their blocks are needed: the next turn of an episode continues one.

    Only whole rows match, so what is computed depends on the requests alone and not on block boundaries.
    """

    def __init__(self, blocks: Blocks) -> None:
        self._blocks = blocks
        self._prefixes: dict[bytes, Prefix] = {}  # oldest first
        self._by_tail: dict[tuple[int, bytes], list[Prefix]] = {}  # by length and last tokens

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, prefix: Prefix) -> None:
        """Take over the blocks of a finished row; equal tokens are stored once."""
        key = prefix.tokens_T.tobytes()
        if key in self._prefixes:
            self._blocks.release(prefix.blocks)
            return
        self._prefixes[key] = prefix
        self._by_tail.setdefault(_tail(prefix.tokens_T), []).append(prefix)

    def longest(self, prompt_T: Tokens) -> Prefix | None:
        """The longest cached row that is a prefix of the prompt."""
        for length in sorted({length for length, _ in self._by_tail if length <= len(prompt_T)}, reverse=True):
            for prefix in self._by_tail.get(_tail(prompt_T[:length]), ()):
                if np.array_equal(prefix.tokens_T, prompt_T[:length]):
                    return prefix
        return None

    def drop_oldest(self) -> bool:
        """Release the blocks of the oldest row; False when there is none."""
        if not self._prefixes:
            return False
        prefix = self._prefixes.pop(next(iter(self._prefixes)))
        tail = _tail(prefix.tokens_T)
        self._by_tail[tail].remove(prefix)
        if not self._by_tail[tail]:
            del self._by_tail[tail]
        self._blocks.release(prefix.blocks)
        return True

    def keep_youngest(self, count: int) -> None:
        """Release the blocks of all rows but the last `count`."""
        while len(self) > count:
            self.drop_oldest()

    def clear(self) -> None:
        """Release all blocks."""
        self.keep_youngest(0)


def _tail(tokens_T: Tokens) -> tuple[int, bytes]:
    return len(tokens_T), tokens_T[-TAIL:].tobytes()


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
