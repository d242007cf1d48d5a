"""Checks a kernel on small cases against plain PyTorch, on the device and with the sizes it will be used for."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from retrain_local.attention.padded import PaddedAttend
from retrain_local.attention.pages import PagedKernels, Pages, zeros
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
    pools = (zeros((*cells, new.shape[2]), stored, device) for new in (new_keys, new_values))
    pages = Pages(*pools, *(torch.zeros(cells, device=device) for _ in range(2) if stored.itemsize == 1))
    kernels.write(new_keys, new_values, pages, torch.arange(len(new_keys), device=device))
    for name, new, (pool, scales) in zip(("keys", "values"), (new_keys, new_values), pages.sides, strict=True):
        found = pool.float() if scales is None else pool.float() * scales[..., None]
        yield from _difference(f"stored {name}", found.flatten(0, 1), new, TOLERANCE[stored])
    queries_BHD = _numbers((len(ROW_LENGTHS), shape.heads, shape.head_size), dtype, device, 2)
    for window in WINDOWS:
        scores = Scores(scale=shape.head_size**-0.5, window=window)
        got, wanted = (one.read(queries_BHD, pages, tables_BM, lengths_B, scores) for one in (kernels, PagedKernels()))
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
