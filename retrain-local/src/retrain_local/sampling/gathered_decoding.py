"""Decoding in plain PyTorch over padded copies of keys and values, on a CPU in two parts."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial

import torch
from torch import Tensor

from retrain.api import SamplingParams
from retrain_local.attention.packed import MakeAttend, dense_attention
from retrain_local.decoder import Decoder, Scores
from retrain_local.devices.torch_devices import limited_threads
from retrain_local.memory.sizes import BLOCK_SIZE, ONE_THREAD_BELOW, PREFILL_TOKENS
from retrain_local.model.states import Mixed, States, StepMix
from retrain_local.sampling.cache import Cache, Pool
from retrain_local.sampling.decode import Batch, decode_step
from retrain_local.sampling.draw import draw_tokens
from retrain_local.sampling.prefill import Note, fill
from retrain_local.sampling.schedule import Prefill, Row

# Tokens that a copy has room for: more means fewer gathers, and more to move when rows are dropped.
COLUMNS = 32


class GatheredAttention:
    """`Attend` of one token per row and step, over a copy of the keys and values of these rows.

    Gathering from the pool for every token would move all keys and values twice as often as attention itself does.
    Every step appends one column to the copy, the same for all rows whatever their lengths, and finished rows are
    dropped. The copy is made again when a row joins or its `columns` are full. Except in fp32, the memory of keys is
    [rows, kv_heads, size, columns]: products of 16 bits would copy them to that layout every time.
    """

    def __init__(
        self, pool: Pool, rows: Sequence[Row], batch: Batch, columns: int, states: States | None = None
    ) -> None:
        """Copy from the pool, with room for `columns` more tokens; `batch` has been loaded with these rows."""
        self._pool = pool
        self.mix = StepMix(states, [row.slot for row in rows]) if states is not None else None
        self._rows = list(rows)
        self._slots = {id(row): row.slot for row in rows}
        slots_BL = batch.cached_slots(pool.block_size)
        lengths_B1 = batch.given.positions_B[:, None]
        past = slots_BL.shape[1]
        self._slots_BC = torch.cat([slots_BL, slots_BL.new_zeros(len(rows), columns)], dim=1)
        columns_C = torch.arange(past + columns, device=slots_BL.device)
        self._positions_BC = torch.where(columns_C < past, columns_C, lengths_B1 + columns_C - past)
        # In fp32, as softmax is computed: in bf16 a sum with the scores would round them.
        self._mask_BC = torch.zeros(self._positions_BC.shape, device=slots_BL.device)
        self._mask_BC.masked_fill_((columns_C < past) & (columns_C >= lengths_B1), -math.inf)
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int | None, int | None, int], Tensor] = {}
        self._first = self._seen = past  # columns in use when the segment began, and now

    def continues(self, rows: Sequence[Row], steps: int) -> bool:
        """Prepare another segment of these rows; False if the copy has to be made again."""
        places = {id(row): place for place, row in enumerate(self._rows)}
        kept = [places.get(id(row)) for row in rows]
        moved = any(row.slot != self._slots.get(id(row)) for row in rows)  # of a row that was put aside in between
        if None in kept or moved or self._seen + steps > self._mask_BC.shape[1]:
            return False
        self._first = self._seen
        if len(kept) < len(self._rows):
            self._rows = list(rows)
            kept_B = torch.tensor(kept, device=self._mask_BC.device)
            if self.mix is not None:
                self.mix.drop(kept_B)
            self._mask_BC, self._positions_BC = self._mask_BC[kept_B], self._positions_BC[kept_B]
            for layer, (keys, values) in self._layers.items():
                self._layers[layer] = self._laid_out(keys.index_select(0, kept_B)), values.index_select(0, kept_B)
        return True

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        if layer == 0:
            self._seen += 1  # another step
            self._masks.clear()
        if layer not in self._layers:
            keys_BKCD, values_BKCD = self._pool.read(layer, self._slots_BC)
            self._layers[layer] = self._laid_out(keys_BKCD), values_BKCD
        keys_BKCD, values_BKCD = self._layers[layer]
        keys_BKCD[:, :, self._seen - 1] = self._pool.rounded(keys_NKD)
        values_BKCD[:, :, self._seen - 1] = self._pool.rounded(values_NKD)
        keys, values = keys_BKCD[:, :, : self._seen], values_BKCD[:, :, : self._seen]
        mask = self._mask(scores.window, scores.chunk, keys.shape[1])
        if scores.softcap is None and scores.sinks_H is None:
            return _plain(queries_NHD, keys, values, mask, scores.scale)
        return dense_attention(queries_NHD[:, :, None], keys, values, mask[:, :1], scores)[:, :, 0]

    def finish(self, slots_SB: Tensor) -> None:
        if self.mix is not None:
            self.mix.finish()
        slots_N = slots_SB[: self._seen - self._first].flatten()
        for layer, copies in self._layers.items():
            new = (states[:, :, self._first : self._seen].permute(2, 0, 1, 3).flatten(0, 1) for states in copies)
            self._pool.write(layer, slots_N, *new)

    def _laid_out(self, keys_BKCD: Tensor) -> Tensor:
        if keys_BKCD.dtype is torch.float32:
            return keys_BKCD
        return keys_BKCD.transpose(2, 3).contiguous().transpose(2, 3)

    def _mask(self, window: int | None, chunk: int | None, kv_heads: int) -> Tensor:
        """Return 0 for a visible column and -inf for others, [B, kv_heads, 1, seen], for all layers of a step."""
        if (window, chunk, kv_heads) not in self._masks:
            mask_BC, positions_BC = self._mask_BC[:, : self._seen], self._positions_BC[:, : self._seen]
            if window is not None:
                mask_BC = mask_BC.masked_fill(positions_BC <= positions_BC[:, -1:] - window, -math.inf)
            if chunk is not None:
                mask_BC = mask_BC.masked_fill(positions_BC // chunk != positions_BC[:, -1:] // chunk, -math.inf)
            self._masks[window, chunk, kv_heads] = mask_BC[:, None, None].expand(-1, kv_heads, -1, -1).contiguous()
        return self._masks[window, chunk, kv_heads]


def _plain(queries_BHD: Tensor, keys_BKCD: Tensor, values_BKCD: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Compute `dense_attention` of one query per head in few calls, where a small model spends most of its time."""
    rows, heads, size = queries_BHD.shape
    kv_heads = keys_BKCD.shape[1]
    queries = queries_BHD.reshape(rows * kv_heads, heads // kv_heads, size)
    keys = keys_BKCD.flatten(0, 1).transpose(1, 2)
    values, mask = values_BKCD.flatten(0, 1), mask.flatten(0, 1)
    if values.dtype is torch.float32:
        weights = torch.baddbmm(mask, queries, keys, alpha=scale)
    else:  # scores are scaled and masked in fp32
        weights = torch.add(mask, torch.bmm(queries, keys), alpha=scale)
    return torch.bmm(torch.softmax(weights, dim=-1).to(values.dtype), values).view(rows, heads, -1)


# Fixed, and not the number of cores: the same rows are then decoded together on every machine, and round the same way.
PARTS = 2
# Each part reads all weights once more, and fewer rows do not gain that back. Measured on two cores, the weights of
# SmolLM2 against one part: 8 rows in a part take 1.3 times as long, 16 as long (in bf16 1.1 times), 32 take 0.93 times.
# A small model's weights stay in the processor's cache.
PART_ROWS, PART_ROWS_SMALL = 32, 8

Decoded = list[tuple[Sequence[Row], Batch]]


class GatheredDecoding:
    """Segments of decoding steps over a pool.

    On a CPU many rows are decoded in two parts, each by its own thread with half of PyTorch's threads. Threads that
    share an operation wait for each other after each one; these parts do not, so a busy machine costs only its share.
    """

    def __init__(self, decoder: Decoder, device: torch.device) -> None:
        self._decoder, self._device = decoder, device
        self._part_rows = PART_ROWS_SMALL if decoder.shape.parameters < ONE_THREAD_BELOW else PART_ROWS
        self._copies: dict[int, GatheredAttention] = {}
        self._threads: ThreadPoolExecutor | None = None

    def fill(self, fills: Sequence[Prefill], cache: Cache, packed: MakeAttend, *, note: Note) -> None:
        fill(fills, self._decoder, cache, packed, max_tokens=min(PREFILL_TOKENS, cache.tokens), note=note)

    def keep(self, cache: Cache, row: Row) -> None:
        """Do nothing: a segment leaves the row's keys, values and state in the cache."""

    def segment(self, cache: Cache, rows: Sequence[Row], params: SamplingParams, steps: int) -> Decoded:
        parts = [list(rows)]
        if self._device.type == "cpu" and len(rows) >= PARTS * self._part_rows:
            parts = [part for number in range(PARTS) if (part := [row for row in rows if row.parity == number])]
        for number in set(self._copies) - set(range(len(parts))):
            del self._copies[number]

        def decode(number: int) -> Batch:
            return self._decoded(number, cache, parts[number], params, steps)

        return list(zip(parts, self._side_by_side(decode, len(parts)), strict=True))

    def forget(self) -> None:
        self._copies.clear()

    def close(self) -> None:
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
            # PyTorch keeps this setting per thread, as it does inference mode.
            torch.set_num_threads(threads)
            with torch.inference_mode():
                return decode(number)

        with limited_threads(threads):
            others = [self._threads.submit(beside, number) for number in range(1, count)]
            try:
                first = decode(0)
            finally:
                wait(others)
        return [first, *(other.result() for other in others)]

    def _decoded(self, number: int, cache: Cache, rows: Sequence[Row], params: SamplingParams, steps: int) -> Batch:
        width = max(row.cached for row in rows) + steps
        batch = Batch.allocate(len(rows), -(-width // BLOCK_SIZE), steps, self._device, self._decoder.routers)
        batch.load(rows, params.temperature, steps, BLOCK_SIZE)
        copied = self._copies.get(number)
        if copied is None or not copied.continues(rows, steps):
            copied = None
            # Frees its memory before the next copy is allocated.
            self._copies.pop(number, None)
            columns = max(steps, min(COLUMNS, max(row.room for row in rows)))
            copied = self._copies[number] = GatheredAttention(cache.pool, rows, batch, columns, cache.states)
        attend = copied if copied.mix is None else Mixed(copied, copied.mix)
        draw = partial(draw_tokens, greedy=params.greedy)
        for _ in range(steps):
            decode_step(self._decoder, attend, batch, entropy=params.entropy, draw_tokens=draw)
        copied.finish(batch.given.slots_SB)
        return batch
