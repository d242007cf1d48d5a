"""The decoding step, one more token for every row of a batch, and its capture as a CUDA graph."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from retrain_local.attention.pages import PagedKernels, Prefixes, shared_prefixes
from retrain_local.decoder import Attend, Decoder, Scores, Target, within
from retrain_local.memory.limits import is_out_of_memory
from retrain_local.model.experts import ROUTING, Routers, Routing
from retrain_local.sampling.cache import Pool
from retrain_local.sampling.draw import Draw, draw_tokens
from retrain_local.sampling.schedule import Row

ALIGNMENT = 16  # bytes: Triton reads an aligned tensor in wider pieces
# Reads of a key that sharing must save: below, another launch takes longer than reading them from each row.
SAVED_READS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Inputs:
    """Inputs of a segment of S steps over B rows, as parts of one tensor `all_N`: one copy fills them.

    `ids_B` is the token to read next and `positions_B` its position in its row; `tables_BM` (int32) are the block
    tables and `lengths_B` (int32) the number of visible keys, including the token being read. Each step writes to
    `slots_SB`; a row without a block there writes to the scratch block. `column_1` is the number of the step.
    `shared_B` and `sharing_B` are the fields of `Prefixes`.
    """

    all_N: Tensor
    uniforms_SB: Tensor
    ids_B: Tensor
    positions_B: Tensor
    slots_SB: Tensor
    column_1: Tensor
    lengths_B: Tensor
    tables_BM: Tensor
    shared_B: Tensor
    sharing_B: Tensor
    temperature: Tensor

    @classmethod
    def allocate(cls, rows: int, width: int, steps: int, device: torch.device, *, pin: bool = False) -> Inputs:
        shapes = {
            "uniforms_SB": ((steps, rows), torch.float64),
            "ids_B": ((rows,), torch.int64),
            "positions_B": ((rows,), torch.int64),
            "slots_SB": ((steps, rows), torch.int64),
            "column_1": ((1,), torch.int64),
            "lengths_B": ((rows,), torch.int32),
            "tables_BM": ((rows, width), torch.int32),
            "shared_B": ((rows,), torch.int32),
            "sharing_B": ((rows,), torch.int32),
            "temperature": ((), torch.float32),
        }
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in shapes.values()]
        padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        all_N = torch.zeros(sum(padded), dtype=torch.uint8, device=device, pin_memory=pin)
        cut = zip(shapes.items(), all_N.split(padded), sizes, strict=True)
        return cls(all_N=all_N, **{name: part[:size].view(of[1]).view(of[0]) for (name, of), part, size in cut})


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Batch:
    """Inputs and outputs of a segment of S steps over B rows, in tensors at fixed addresses.

    `staged` are the inputs on the host. `drawn_3SB` (int32) holds tokens, and the bits of log-probabilities and of
    entropies: one copy reads them.
    """

    given: Inputs
    staged: Inputs
    slots_B: Tensor
    drawn_3SB: Tensor
    experts_SBLK: Tensor  # of a mixture whose routers are known

    @classmethod
    def allocate(cls, rows: int, width: int, steps: int, device: torch.device, routers: Routers | None = None) -> Batch:
        """Allocate rows that read token 0 and write to scratch; `width` is the longest table."""
        given, host = Inputs.allocate(rows, width, steps, device), torch.device("cpu")
        experts = (steps, rows, *(routers.size if routers else (0, 0)))
        return cls(
            given=given,
            staged=given if device.type == "cpu" else Inputs.allocate(rows, width, steps, host, pin=True),
            slots_B=torch.zeros(rows, dtype=torch.int64, device=device),
            drawn_3SB=torch.zeros(3, steps, rows, dtype=torch.int32, device=device),
            experts_SBLK=torch.zeros(experts, dtype=torch.int16, device=device),
        )

    @property
    def advanced(self) -> tuple[Tensor, ...]:
        given = self.given
        return given.ids_B, given.positions_B, given.lengths_B, given.column_1

    def load(
        self, rows: Sequence[Row], temperature: float, steps: int, block_size: int, *, most_sharing: int = 1
    ) -> bool:
        """Fill the inputs; True if it pays to read shared prefixes once, each for at most `most_sharing` rows."""
        staged, count = self.staged, len(rows)
        staged.all_N.zero_()
        size, width = staged.tables_BM.shape
        tables, cached = staged.tables_BM.numpy(), staged.positions_B.numpy()
        for place, row in enumerate(rows):
            # Blocks beyond the longest row are reserved for later segments.
            seen = row.blocks[:width]
            tables[place, : len(seen)] = seen
        cached[:count] = [row.cached for row in rows]
        positions_SB = cached[None, :] + np.arange(steps)[:, None]
        blocks_SB = tables[np.arange(size)[None, :], np.minimum(positions_SB // block_size, width - 1)]
        staged.slots_SB.numpy()[:steps] = blocks_SB.astype(np.int64) * block_size + positions_SB % block_size
        staged.lengths_B.numpy()[:] = cached + 1
        staged.ids_B.numpy()[:count] = [row.last for row in rows]
        staged.uniforms_SB.numpy()[:steps, :count] = np.stack([row.stream.random(steps) for row in rows]).T
        staged.temperature.fill_(temperature)
        saved = 0
        if most_sharing > 1:
            blocks_B, sharing_B = shared_prefixes(tables, most_sharing)
            shared_B = blocks_B * block_size
            saved = int(shared_B.sum() - shared_B[sharing_B > 0].sum())
            staged.shared_B.numpy()[:], staged.sharing_B.numpy()[:] = shared_B, sharing_B
        if self.given is not staged:
            # The results of the segment before were read, so its inputs have been copied.
            self.given.all_N.copy_(staged.all_N, non_blocking=True)
        return saved >= SAVED_READS

    def drawn(self, rows: int, steps: int, *, entropy: bool) -> list[Any]:
        """Return tokens, log-probabilities and, with `entropy`, entropies of each row: the host waits for them."""
        drawn_3SB = self.drawn_3SB.cpu()
        kinds = (drawn_3SB[0], *drawn_3SB[1 : 2 + entropy].view(torch.float32))
        return [kind_SB[:steps, :rows].T.tolist() for kind_SB in kinds]

    def cached_slots(self, block_size: int) -> Tensor:
        """Return the slots [B, L] of the tokens before the one to read; scratch behind the end of a row."""
        positions_B = self.given.positions_B
        columns_L = torch.arange(int(positions_B.max()), device=positions_B.device)
        slots_BL = self.given.tables_BM.long()[:, columns_L // block_size] * block_size + columns_L % block_size
        return slots_BL * (columns_L < positions_B[:, None])


class PagedAttention:
    """`PagedAttend` of one token per row and step, by kernels that read the blocks of the pool in place."""

    def __init__(self, pool: Pool, batch: Batch, kernels: PagedKernels) -> None:
        self._pool, self._batch, self._kernels = pool, batch, kernels
        self.is_sharing = False

    def __call__(self, layer: int, queries_NHD: Tensor, keys_NKD: Tensor, values_NKD: Tensor, scores: Scores) -> Tensor:
        self._kernels.write(keys_NKD, values_NKD, self._pool.layers[layer], self._batch.slots_B)
        return self.read(layer, queries_NHD, scores)

    def target(self, layer: int) -> Target | None:
        if not self._pool.is_exact:
            return None
        keys_SKD, values_SKD = (cells.flatten(0, 1) for cells, _ in self._pool.layers[layer].sides)
        return Target(keys_SKD=keys_SKD, values_SKD=values_SKD, slots_B=self._batch.slots_B)

    def read(self, layer: int, queries_NHD: Tensor, scores: Scores) -> Tensor:
        given, pages = self._batch.given, self._pool.layers[layer]
        prefixes = Prefixes(given.shared_B, given.sharing_B) if self.is_sharing else None
        return self._kernels.read(queries_NHD, pages, given.tables_BM, given.lengths_B, scores, prefixes)


def decode_step(
    decoder: Decoder, attend: Attend, batch: Batch, *, entropy: bool, draw_tokens: Draw = draw_tokens
) -> None:
    """Read one token per row, sample the next one, and prepare to read that."""
    # sizes depend on the batch only and nothing is copied to the host, so that CUDA graphs can capture the step
    given = batch.given
    torch.index_select(given.slots_SB, 0, given.column_1, out=batch.slots_B.view(1, -1))
    positions_B = given.positions_B
    if decoder.shape.context is not None:
        # finished rows stay to the end of the segment, possibly past the last valid position
        positions_B = positions_B.clamp(max=decoder.shape.context - 1)
    with within(ROUTING, routing := Routing() if decoder.routers else None):
        hidden_BD = decoder.hidden(given.ids_B, positions_B, attend)
    logits_BV = decoder.logits(hidden_BD)
    if routing is not None:
        batch.experts_SBLK.index_copy_(0, given.column_1, routing.chosen_NLK().to(torch.int16)[None])
    uniforms_B = given.uniforms_SB.index_select(0, given.column_1)[0]
    draw = draw_tokens(logits_BV, given.temperature, uniforms_B, entropy=entropy)
    batch.drawn_3SB[0].index_copy_(0, given.column_1, draw.tokens_B[None].to(torch.int32))
    for kind, values_B in ((1, draw.logprobs_B), (2, draw.entropies_B)):
        if values_B is not None:
            batch.drawn_3SB[kind].index_copy_(0, given.column_1, values_B[None].view(torch.int32))
    given.ids_B.copy_(draw.tokens_B)
    for counter in (given.positions_B, given.lengths_B, given.column_1):
        counter.add_(1)


log = logging.getLogger("retrain")
MIDDLE, LARGE = 8, 32  # steps between buckets up to 32 rows and above
WARM_UP = 2  # calls before the capture, to initialise libraries and compile Triton's kernels


def bucket(rows: int) -> int:
    """Return the padded batch size for `rows` rows: 1, 2, 4, 8, 16, 24, 32, 64, 96, 128, 160 and so on."""
    if rows <= MIDDLE:
        return 1 << (rows - 1).bit_length()
    step = MIDDLE if rows <= LARGE else LARGE
    return -(-rows // step) * step


class Graphs:
    """Captured steps by key.

    They share one memory pool, since they run one after another and only write to tensors allocated before the capture.
    A step takes no argument and returns nothing; it works on tensors at fixed addresses, never synchronises, and does
    the same for the same key. If a capture fails, steps run without graphs, after one warning.
    """

    def __init__(self, device: torch.device, *, records: bool = True) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None
        # with the tensors that a graph updates, to keep them alive
        self._recordings: dict[Hashable, tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]] = {}
        self._records = records and device.type == "cuda"

    def __len__(self) -> int:
        return len(self._recordings)

    def run(self, key: Hashable, step: Callable[[], None], state: Sequence[Tensor]) -> None:
        """Run `step` once; `state` lists the tensors that it updates. It is captured again where they have moved."""
        if not self._records:
            step()
            return
        with torch.cuda.device(self._device):
            graph, recorded = self._recordings.get(key, (None, ()))
            if graph is None or [x.data_ptr() for x in recorded] != [x.data_ptr() for x in state]:
                graph = self._captured(step, state)
                if graph is None:
                    step()
                    return
                self._recordings[key] = graph, tuple(state)
            graph.replay()

    def forget(self) -> None:
        self._recordings.clear()
        self._pool = None

    def _captured(self, step: Callable[[], None], state: Sequence[Tensor]) -> torch.cuda.CUDAGraph | None:
        before, current = [tensor.clone() for tensor in state], torch.cuda.current_stream()
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        try:
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP):
                    step()
                    _put_back(state, before)
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            # another thread may be training: its CUDA calls must not invalidate this capture
            with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
                step()
        except RuntimeError as error:
            torch.cuda.set_stream(current)  # torch's `graph` leaves its own behind
            if _ran_out(error):
                raise torch.OutOfMemoryError(str(error)) from error
            log.warning("CUDA graphs are off, decoding step by step: %s", str(error).splitlines()[0])
            self._records = False
            self.forget()
            torch.cuda.synchronize()
            _put_back(state, before)
            return None
        return graph


def _ran_out(error: BaseException | None) -> bool:
    """True if running out of memory is the root cause: ending a broken capture raises another error."""
    while error is not None:
        if isinstance(error, RuntimeError) and is_out_of_memory(error):
            return True
        error = error.__context__
    return False


def _put_back(state: Sequence[Tensor], before: Sequence[Tensor]) -> None:
    for tensor, old in zip(state, before, strict=True):
        tensor.copy_(old)
