"""Checks a kernel on small cases against plain PyTorch, on the device and with the sizes it will be used for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from retrain_local.attention.padded import PaddedAttend, dense_attention
from retrain_local.attention.pages import LARGEST, PagedKernels, as_bytes, zeros
from retrain_local.attention.spans import Spans
from retrain_local.decoder import Attend, Scores, Shape

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}  # of the largest element
TOLERANCE |= {torch.int8: 1e-2, torch.float8_e4m3fn: 7e-2}  # half a unit in the last place, plus the rounding of bf16
CASE = Spans(lengths=(40, 1, 19, 130, 3, 5), prefixes=(-1, 0, 0, -1, 3, 3))
ROW_LENGTHS = 1, 16, 45, 300, 0
BLOCK_SIZE = 16
WINDOWS = None, 7


def packed_fault(
    make: Callable[[Spans, torch.device], Attend], shape: Shape, device: torch.device, dtype: torch.dtype
) -> str | None:
    """What is wrong with the outputs and gradients of these `Attend`s; None if they agree with `PaddedAttend`."""
    return _first(_packed_faults(make, shape, device, dtype))


def paged_fault(
    kernels: PagedKernels, shape: Shape, device: torch.device, dtype: torch.dtype, stored: torch.dtype
) -> str | None:
    """What is wrong with these kernels over a pool of `stored`; None if they agree with the reference."""
    return _first(_paged_faults(kernels, shape, device, dtype, stored))


def _packed_faults(
    make: Callable[[Spans, torch.device], Attend], shape: Shape, device: torch.device, dtype: torch.dtype
) -> Iterator[str]:
    for window in WINDOWS:
        scores = Scores(scale=shape.head_size**-0.5, window=window)
        got, wanted = (
            _differentiated(maker(CASE, device), shape, device, dtype, scores) for maker in (make, PaddedAttend)
        )
        for name, one, other in zip(("output", "dq", "dk", "dv"), got, wanted, strict=True):
            yield from _difference(name, one, other, TOLERANCE[dtype])


def _differentiated(
    attend: Attend, shape: Shape, device: torch.device, dtype: torch.dtype, scores: Scores
) -> tuple[Tensor, ...]:
    """Attention output of the packed tokens, and the gradients of queries, keys and values."""
    tokens = CASE.num_tokens
    sizes = (shape.heads, shape.head_size), (shape.kv_heads, shape.head_size), (shape.kv_heads, shape.value_size)
    inputs = [_numbers((tokens, *size), dtype, device, at).requires_grad_() for at, size in enumerate(sizes)]
    queries_NHD, keys_NKD, values_NKD = inputs
    with torch.enable_grad():
        out = attend(0, queries_NHD, keys_NKD, values_NKD, scores)
        weighed = (out.float() * _numbers((tokens, shape.heads, shape.value_size), torch.float32, device, 3)).sum()
        return out.detach(), *torch.autograd.grad(weighed, inputs)


def _paged_faults(
    kernels: PagedKernels, shape: Shape, device: torch.device, dtype: torch.dtype, stored: torch.dtype
) -> Iterator[str]:
    blocks = [-(-length // BLOCK_SIZE) for length in ROW_LENGTHS]
    table = 1 + torch.arange(sum(blocks), dtype=torch.int32).flip(0)  # block 0 is scratch
    tables_BM = torch.nn.utils.rnn.pad_sequence(list(table.split(blocks)), batch_first=True).to(device)
    lengths_B = torch.tensor(ROW_LENGTHS, dtype=torch.int32, device=device)
    cells = 1 + sum(blocks), BLOCK_SIZE, shape.kv_heads
    new_keys, new_values = (
        _numbers((math.prod(cells[:2]), shape.kv_heads, size), dtype, device, at)
        for at, size in enumerate((shape.head_size, shape.value_size))
    )
    keys, values = (zeros((*cells, new.shape[2]), stored, device) for new in (new_keys, new_values))
    key_scales, value_scales = (
        torch.zeros(cells, device=device) if stored.itemsize == 1 else None for _ in (keys, values)
    )
    kernels.write(
        new_keys, new_values, keys, values, torch.arange(len(new_keys), device=device), key_scales, value_scales
    )
    for name, new, pool, scales in (
        ("stored keys", new_keys, keys, key_scales),
        ("stored values", new_values, values, value_scales),
    ):
        found = pool.float() if scales is None else pool.float() * scales[..., None]
        yield from _difference(name, found.flatten(0, 1), new, TOLERANCE[stored])
    queries_BHD = _numbers((len(ROW_LENGTHS), shape.heads, shape.head_size), dtype, device, 2)
    for window in WINDOWS:
        scores = Scores(scale=shape.head_size**-0.5, window=window)
        got, wanted = (
            one.read(queries_BHD, keys, values, tables_BM, lengths_B, scores, key_scales, value_scales)
            for one in (kernels, PlainPages())
        )
        yield from _difference("output", got, wanted, TOLERANCE[dtype])


def _difference(name: str, got: Tensor, wanted: Tensor, tolerance: float) -> Iterator[str]:
    gap, largest = float((got.float() - wanted.float()).abs().max()), float(wanted.float().abs().max())
    if not gap <= tolerance * largest:  # True for a NaN as well
        yield f"{name} off by {gap:.2g}, of {largest:.2g} at most"


def _numbers(size: tuple[int, ...], dtype: torch.dtype, device: torch.device, at: int) -> Tensor:
    """Random numbers between -1 and 1, equal on every device.

    Those of a formula cancel in the sums over heads and tokens: in 16 bits rounding was then most of a gradient.
    """
    numbers = torch.rand(size, generator=torch.Generator().manual_seed(at), dtype=torch.float64)
    return (2 * numbers - 1).to(device, dtype)


def _first(faults: Iterator[str]) -> str | None:
    """Kernel libraries raise exceptions of any class when they cannot compile or launch."""
    try:
        return next(faults, None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


class PlainPages:
    """Computes in fp32 and synchronises with the device."""

    def write(
        self,
        keys_NKD: Tensor,
        values_NKD: Tensor,
        keys: Tensor,
        values: Tensor,
        slots_N: Tensor,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> None:
        """See `PagedKernels`."""
        for new, pool, scales in ((keys_NKD, keys, key_scales), (values_NKD, values, value_scales)):
            cells = new
            if scales is not None:
                scales_NK = new.float().abs().amax(-1) / LARGEST[pool.dtype]
                scales_NK = torch.where(scales_NK == 0, 1.0, scales_NK)
                scales.flatten(0, 1)[slots_N] = scales_NK
                cells = new.float() / scales_NK[..., None]
                cells = cells.round() if pool.dtype is torch.int8 else cells
            as_bytes(pool).flatten(0, 1)[slots_N] = as_bytes(cells.to(pool.dtype))

    def read(
        self,
        queries_BHD: Tensor,
        keys: Tensor,
        values: Tensor,
        tables_BM: Tensor,
        lengths_B: Tensor,
        scores: Scores,
        key_scales: Tensor | None = None,
        value_scales: Tensor | None = None,
    ) -> Tensor:
        """See `PagedKernels`."""
        sides = (keys, key_scales), (values, value_scales)
        most = tables_BM.shape[1] * keys.shape[1]
        gathered = []
        for queries_HD, table_M, length in zip(queries_BHD.float(), tables_BM.long(), lengths_B.tolist(), strict=True):
            length = min(length, most)
            if length == 0:
                gathered.append(queries_HD.new_zeros(len(queries_HD), values.shape[-1]))
                continue
            first = max(0, length - (scores.window or length))
            seen_keys, seen_values = (
                _read(pool, scales, table_M).flatten(0, 1)[first:length].transpose(0, 1)[None] for pool, scales in sides
            )
            gathered.append(dense_attention(queries_HD[None, :, None], seen_keys, seen_values, None, scores)[0, :, 0])
        return torch.stack(gathered).to(queries_BHD.dtype)


def _read(pool: Tensor, scales: Tensor | None, blocks: Tensor) -> Tensor:
    cells = as_bytes(pool)[blocks].view(pool.dtype).float()
    return cells if scales is None else cells * scales[blocks][..., None]
