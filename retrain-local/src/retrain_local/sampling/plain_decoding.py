"""Prompts and decoding of the tier plain: a row's slot holds the model's own cache, or the row's tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from retrain.api import SamplingParams
from retrain_local.attention.packed import MakeAttend
from retrain_local.memory.sizes import BLOCK_SIZE
from retrain_local.model.plain import PlainDecoder, RowStep
from retrain_local.sampling.cache import Cache
from retrain_local.sampling.decode import Batch, decode_step
from retrain_local.sampling.draw import draw_tokens
from retrain_local.sampling.prefill import Note
from retrain_local.sampling.schedule import Prefill, Row


class PlainDecoding:
    """Segments of decoding steps, rows of one length class at a time."""

    def __init__(self, decoder: PlainDecoder) -> None:
        self._decoder = decoder
        self._classes: list[tuple[list[Row], RowStep]] = []

    def fill(self, fills: Sequence[Prefill], cache: Cache, packed: MakeAttend, *, note: Note) -> None:
        """Read the new tokens of each row, after the tokens in its source slot."""
        cache.kept = {slot: kept for slot, kept in cache.kept.items() if cache.slots and cache.slots.is_owned(slot)}
        for each in fills:
            note([each])
            kept = RowStep([cache.kept[each.source]]).of_row(0) if each.past else None
            if len(each.tokens_T):
                ids_1T = torch.from_numpy(each.tokens_T)[None].to(self._decoder.device)
                _, kept = self._decoder.continued(ids_1T, kept)
            cache.kept[each.slot] = kept

    def segment(
        self, cache: Cache, rows: Sequence[Row], params: SamplingParams, steps: int
    ) -> list[tuple[Sequence[Row], Batch]]:
        self._update(cache, rows)
        return [(part, self._decoded(part, step, params, steps)) for part, step in self._classes]

    def keep(self, cache: Cache, row: Row) -> None:
        """Store the state of this row in its slot."""
        for part, step in self._classes:
            if row in part:
                cache.kept[row.slot] = step.of_row(part.index(row))

    def forget(self) -> None:
        self._classes.clear()

    def close(self) -> None:
        self.forget()

    def _update(self, cache: Cache, rows: Sequence[Row]) -> None:
        """Drop rows that no longer run, and group new ones by their length."""
        running, known = set(rows), set[Row]()
        classes = []
        for part, step in self._classes:
            places = [place for place, row in enumerate(part) if row in running and row.slot]
            known |= {part[place] for place in places}
            if not places:
                continue
            if len(places) < len(part):
                step.drop(torch.tensor(places, device=self._decoder.device))
            classes.append(([part[place] for place in places], step))
        new: dict[int, list[Row]] = {}
        for row in rows:
            if row not in known:
                new.setdefault(row.cached, []).append(row)
        for part in new.values():
            classes.append((part, RowStep([cache.kept.pop(row.slot) for row in part])))
        self._classes = classes

    def _decoded(self, rows: Sequence[Row], step: RowStep, params: SamplingParams, steps: int) -> Batch:
        width = max(row.cached for row in rows) + steps
        batch = Batch.allocate(len(rows), -(-width // BLOCK_SIZE), steps, self._decoder.device)
        batch.load(rows, params.temperature, steps, BLOCK_SIZE)
        draw = partial(draw_tokens, greedy=params.greedy)
        for _ in range(steps):
            decode_step(self._decoder, step, batch, entropy=params.entropy, draw_tokens=draw)
        return batch
