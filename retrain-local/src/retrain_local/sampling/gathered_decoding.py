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
from retrain_local.attention.packed import MakeAttend, softmax_with_sinks
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
# A shorter prompt is copied for each row: its own products would take longer than reading it.
SHARED_TOKENS = BLOCK_SIZE


class Groups:
    """Rows with the same prompt, whose keys and values are read once for all of them.

    Prompts are padded to the longest, and their rows to M per prompt: `members_N` holds the row at each of the G x M
    places, `places_B` the place of each row.
    """

    def __init__(self, rows: Sequence[Row], device: torch.device) -> None:
        places: dict[bytes, list[int]] = {}
        for place, row in enumerate(rows):
            places.setdefault(row.prompt_key, []).append(place)
        self.keys, self._most = list(places), max(map(len, places.values()))
        self.first_G = torch.tensor([of[0] for of in places.values()], device=device)
        self.lengths_B1 = torch.tensor([[len(row.prompt_T) - 1] for row in rows], device=device)
        padded = [place for of in places.values() for place in (of + of[:1] * self._most)[: self._most]]
        number = {place: at for at, place in reversed(list(enumerate(padded)))}
        in_order = padded == list(range(len(rows)))
        self._members_N = None if in_order else torch.tensor(padded, device=device)
        self._places_B = (
            None if in_order else torch.tensor([number[place] for place in range(len(rows))], device=device)
        )

    def by_prompt(self, x_BKRS: Tensor) -> Tensor:
        """Return [G * K, M * R, S]: the rows of each prompt side by side."""
        x = x_BKRS if self._members_N is None else x_BKRS.index_select(0, self._members_N)
        return x.unflatten(0, (-1, self._most)).transpose(1, 2).flatten(2, 3).flatten(0, 1)

    def by_row(self, x: Tensor, kv_heads: int) -> Tensor:
        """Return what `by_prompt` put together as [B, K, R, S]."""
        x = x.unflatten(1, (self._most, -1)).unflatten(0, (-1, kv_heads)).transpose(1, 2).flatten(0, 1)
        return x if self._places_B is None else x.index_select(0, self._places_B)


def shared_prompts(rows: Sequence[Row], device: torch.device) -> Groups | None:
    """Return the groups of these rows, if reading prompts once is worth the products that it adds."""
    prompts = {row.prompt_key: len(row.prompt_T) for row in rows}
    is_worth = len(rows) >= 2 * len(prompts) and max(prompts.values()) > SHARED_TOKENS
    return Groups(rows, device) if is_worth else None


class GatheredAttention:
    """`Attend` of one token per row and step, over a copy of the keys and values of these rows.

    Gathering from the pool for every token would move all keys and values twice as often as attention itself does.
    Every step appends one column to the copy, the same for all rows whatever their lengths, and finished rows are
    dropped. The copy is made again when a row joins or its `columns` are full. Prompts of several rows are copied and
    read once. Except in fp32, the memory of keys is [rows, kv_heads, size, columns]: products of 16 bits would copy
    them to that layout every time.
    """

    def __init__(
        self, pool: Pool, rows: Sequence[Row], batch: Batch, columns: int, states: States | None = None
    ) -> None:
        """Copy from the pool, with room for `columns` more tokens; `batch` has been loaded with these rows."""
        self._pool = pool
        self.mix = StepMix(states, [row.slot for row in rows]) if states is not None else None
        self._rows = list(rows)
        self._slots = {id(row): row.slot for row in rows}
        slots_BL, cached_B1 = batch.cached_slots(pool.block_size), batch.given.positions_B[:, None]
        device = slots_BL.device
        self._groups = shared_prompts(rows, device)
        prompt_B1 = torch.zeros_like(cached_B1) if self._groups is None else self._groups.lengths_B1
        shared, past = int(prompt_B1.max()), int((cached_B1 - prompt_B1).max())
        columns_P, columns_C = torch.arange(shared, device=device), torch.arange(past + columns, device=device)
        own_BC = prompt_B1 + columns_C
        self._positions_BC = torch.cat(
            [columns_P.expand(len(rows), -1), torch.where(columns_C < past, own_BC, cached_B1 + columns_C - past)], 1
        )
        is_hidden_BC = torch.cat([columns_P >= prompt_B1, (columns_C < past) & (own_BC >= cached_B1)], 1)
        # In fp32, as softmax is computed: in bf16 a sum with the scores would round them.
        self._mask_BC = torch.zeros(is_hidden_BC.shape, device=device).masked_fill_(is_hidden_BC, -math.inf)
        padded_BL = torch.cat([slots_BL, slots_BL.new_zeros(len(rows), 1)], dim=1)  # scratch behind the end
        self._slots_BC = padded_BL.gather(1, own_BC.clamp(max=slots_BL.shape[1]))
        self._slots_GP = None if self._groups is None else slots_BL[self._groups.first_G, :shared]
        self._shared = shared
        # Keys and values of the rows, and of the shared prompts.
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self._prompts: dict[int, tuple[Tensor, Tensor]] = {}
        self._masks: dict[tuple[int | None, int | None], Tensor] = {}
        self._first = self._seen = past  # columns in use when the segment began, and now

    def continues(self, rows: Sequence[Row], steps: int) -> bool:
        """Prepare another segment of these rows; False if the copy has to be made again."""
        places = {id(row): place for place, row in enumerate(self._rows)}
        kept = [places.get(id(row)) for row in rows]
        moved = any(row.slot != self._slots.get(id(row)) for row in rows)  # of a row that was put aside in between
        if None in kept or moved or self._shared + self._seen + steps > self._mask_BC.shape[1]:
            return False
        self._first = self._seen
        if len(kept) < len(self._rows):
            self._keep(rows, torch.tensor(kept, device=self._mask_BC.device))
        return True

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        if layer == 0:
            self._seen += 1  # another step
            self._masks.clear()
        if layer not in self._layers:
            keys_BKCD, values_BKCD = self._pool.read(layer, self._slots_BC)
            self._layers[layer] = self._laid_out(keys_BKCD), values_BKCD
            if self._slots_GP is not None:
                keys_GKPD, values_GKPD = self._pool.read(layer, self._slots_GP)
                self._prompts[layer] = self._laid_out(keys_GKPD), values_GKPD
        copies = self._layers[layer]
        for copy, states_NKD in zip(copies, (keys_NKD, values_NKD), strict=True):
            copy[:, :, self._seen - 1] = self._pool.rounded(states_NKD)
        keys, values = (copy[:, :, : self._seen].flatten(0, 1) for copy in copies)
        rows, kv_heads = keys_NKD.shape[:2]
        queries = queries_NHD.unflatten(1, (kv_heads, -1))
        scores_BKRC = torch.bmm(queries.flatten(0, 1), keys.transpose(1, 2)).unflatten(0, (rows, kv_heads))
        groups = self._groups
        if groups is not None:
            keys_GKPD, values_GKPD = self._prompts[layer]
            of_prompt = torch.bmm(groups.by_prompt(queries), keys_GKPD.flatten(0, 1).transpose(1, 2))
            scores_BKRC = torch.cat([groups.by_row(of_prompt, kv_heads), scores_BKRC], dim=-1)
        mask = self._mask(scores.window, scores.chunk)
        weights_BKRC = attention_weights(scores_BKRC, mask, scores).to(values.dtype)
        out = torch.bmm(weights_BKRC[..., self._shared :].flatten(0, 1), values).unflatten(0, (rows, kv_heads))
        if groups is not None:
            of_prompt = torch.bmm(groups.by_prompt(weights_BKRC[..., : self._shared]), values_GKPD.flatten(0, 1))
            out += groups.by_row(of_prompt, kv_heads)
        return out.flatten(1, 2)

    def finish(self, slots_SB: Tensor) -> None:
        if self.mix is not None:
            self.mix.finish()
        slots_N = slots_SB[: self._seen - self._first].flatten()
        for layer, copies in self._layers.items():
            new = (states[:, :, self._first : self._seen].permute(2, 0, 1, 3).flatten(0, 1) for states in copies)
            self._pool.write(layer, slots_N, *new)

    def _keep(self, rows: Sequence[Row], kept_B: Tensor) -> None:
        self._rows = list(rows)
        if self.mix is not None:
            self.mix.drop(kept_B)
        self._mask_BC, self._positions_BC = self._mask_BC[kept_B], self._positions_BC[kept_B]
        self._select(self._layers, kept_B)
        if self._groups is not None:
            known, self._groups = self._groups.keys, Groups(rows, kept_B.device)
            if self._groups.keys != known:
                kept = [known.index(key) for key in self._groups.keys]
                self._select(self._prompts, torch.tensor(kept, device=kept_B.device))

    def _select(self, copies: dict[int, tuple[Tensor, Tensor]], kept: Tensor) -> None:
        for layer, (keys, values) in copies.items():
            copies[layer] = self._laid_out(keys.index_select(0, kept)), values.index_select(0, kept)

    def _laid_out(self, keys_BKCD: Tensor) -> Tensor:
        if keys_BKCD.dtype is torch.float32:
            return keys_BKCD
        return keys_BKCD.transpose(2, 3).contiguous().transpose(2, 3)

    def _mask(self, window: int | None, chunk: int | None) -> Tensor:
        """Return 0 for a visible column and -inf for others, [B, 1, 1, seen], for all layers of a step."""
        if (window, chunk) not in self._masks:
            seen = self._shared + self._seen
            mask_BC, positions_BC = self._mask_BC[:, :seen], self._positions_BC[:, :seen]
            if window is not None:
                mask_BC = mask_BC.masked_fill(positions_BC <= positions_BC[:, -1:] - window, -math.inf)
            if chunk is not None:
                mask_BC = mask_BC.masked_fill(positions_BC // chunk != positions_BC[:, -1:] // chunk, -math.inf)
            self._masks[window, chunk] = mask_BC[:, None, None]
        return self._masks[window, chunk]


def attention_weights(scores_BKRC: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """Return softmax(softcap(scale q k^T) + mask) in fp32, a sink in its denominator where `scores` has one."""
    if scores.softcap is None:
        weights = torch.add(mask, scores_BKRC, alpha=scores.scale)
    else:
        weights = (scores_BKRC.float() * (scores.scale / scores.softcap)).tanh_().mul_(scores.softcap).add_(mask)
    sinks_KR1 = None if scores.sinks_H is None else scores.sinks_H.view(weights.shape[1], -1, 1)
    return softmax_with_sinks(weights, sinks_KR1)


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
