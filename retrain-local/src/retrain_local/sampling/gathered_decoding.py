"""Decoding in plain PyTorch: the running rows in two parts, decoded side by side on a CPU."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch

from retrain.api import SamplingParams
from retrain_local.decoder import Decoder
from retrain_local.sampling.decode import Batch, decode_step
from retrain_local.sampling.draw import draw_tokens
from retrain_local.sampling.gathered_attention import COLUMNS, GatheredAttention
from retrain_local.sampling.pool import Pool
from retrain_local.sampling.rows import Row
from retrain_local.sizes import BLOCK_SIZE
from retrain_local.torch_modes import limited_threads

PARTS = 2  # whatever the machine, so that the same rows are always decoded together and round the same way
PART_ROWS = 8  # fewer rows are not worth reading the weights once more for

Decoded = list[tuple[Sequence[Row], Batch]]


class GatheredDecoding:
    """Segments of decoding steps over a pool.

    On a CPU the rows are decoded in two parts, each by a thread of its own with half of PyTorch's threads. The parts
    never wait for each other within a segment, as threads that share an operation do after each one, so a busy machine
    slows them down by no more than what it takes away; and the work between two operations is shared as well.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder, self._device = decoder, device
        self._copies: dict[int, GatheredAttention] = {}
        self._threads: ThreadPoolExecutor | None = None

    def segment(self, pool: Pool, rows: Sequence[Row], params: SamplingParams, steps: int) -> Decoded:
        """Sample `steps` tokens for each of the rows, part by part."""
        parts = [list(rows)]
        if self._device.type == "cpu" and len(rows) >= PARTS * PART_ROWS:
            parts = [part for number in range(PARTS) if (part := [row for row in rows if row.parity == number])]
        for number in set(self._copies) - set(range(len(parts))):
            del self._copies[number]

        def decode(number: int) -> Batch:
            return self._decoded(number, pool, parts[number], params, steps)

        return list(zip(parts, self._side_by_side(decode, len(parts)), strict=True))

    def forget(self) -> None:
        """Drop the copies of keys and values."""
        self._copies.clear()

    def close(self) -> None:
        """Drop the copies and stop the threads."""
        self.forget()
        if self._threads is not None:
            self._threads.shutdown()
            self._threads = None

    def _side_by_side(self, decode: Callable[[int], Batch], count: int) -> list[Batch]:
        if count == 1 or (os.cpu_count() or 1) == 1:
            return [decode(number) for number in range(count)]
        threads = max(1, torch.get_num_threads() // count)
        self._threads = self._threads or ThreadPoolExecutor(PARTS - 1, thread_name_prefix="decode")

        def beside(number: int) -> Batch:
            torch.set_num_threads(threads)  # like the mode, a setting of the thread
            with torch.inference_mode():
                return decode(number)

        with limited_threads(threads):
            others = [self._threads.submit(beside, number) for number in range(1, count)]
            try:
                first = decode(0)
            finally:
                wait(others)
        return [first, *(other.result() for other in others)]

    def _decoded(self, number: int, pool: Pool, rows: Sequence[Row], params: SamplingParams, steps: int) -> Batch:
        width = max(row.cached for row in rows) + steps
        batch = Batch.allocate(len(rows), -(-width // BLOCK_SIZE), steps, self._device)
        batch.load(rows, params.temperature, steps, BLOCK_SIZE)
        copied = self._copies.get(number)
        if copied is None or not copied.continues(rows, steps):
            copied = None
            self._copies.pop(number, None)  # free its memory before allocating the next
            columns = max(steps, min(COLUMNS, max(row.room for row in rows)))
            copied = self._copies[number] = GatheredAttention(pool, rows, batch, columns)
        draw = partial(draw_tokens, greedy=params.greedy)
        for _ in range(steps):
            decode_step(self._decoder, copied, batch, entropy=params.entropy, draw_tokens=draw)
        copied.finish(batch.slots_SB)
        return batch
