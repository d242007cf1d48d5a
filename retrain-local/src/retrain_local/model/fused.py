"""Fused kernels between the matrix products of a layer, used where Triton is available and a trial passes.

Launches per layer and token when one token per row is decoded: a norm with the residual's addition, two products with
the adapter's share, heads with their positions and the cache, attention (one more where keys are cut into stretches),
the norm again, gates, and three more products. With `SampledStacked` these are 11 or 12 launches; separate operations
and products take 20 or 21.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from torch import Tensor

from retrain_local.decoder import Shape, Target
from retrain_local.devices import kernel_trials
from retrain_local.devices.kernel_trials import numbers, proven
from retrain_local.model import operations
from retrain_local.model.operations import Operations, Turn
from retrain_local.model.projection import Gates, LowRankSum
from retrain_local.model.weights import stacked_rows

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest element
EPS = 1e-6
ROWS = 3
# Fewer than a tile has, and more. Triton compiles other variants for 1, for multiples of 16 and for other numbers.
DECODED_ROWS = 1, 3, 16, 33, 48
Case = Callable[[Operations, Tensor], tuple[Tensor, ...]]


def fused_operations(device: torch.device, dtype: torch.dtype, shape: Shape) -> Operations:
    place = "retrain_local.model.operations_triton:OPERATIONS"
    return proven("fused kernels", device, place, lambda made: faults(made, device, dtype, shape)) or Operations()


def faults(made: Operations, device: torch.device, dtype: torch.dtype, shape: Shape) -> Iterator[str]:
    """Yield where these or their gradients differ from PyTorch's operations on a few rows of the decoder's sizes."""
    plain, heads = Operations(), shape.heads + 2 * shape.kv_heads
    weight = numbers((shape.hidden,), dtype, device)
    cases: list[tuple[tuple[str, ...], tuple[int, ...], Case]] = [
        (("norm",), (ROWS, shape.hidden), lambda do, x: (do.rms_norm(x, weight, EPS),)),
        (("gate",), (ROWS, 2 * shape.inner), lambda do, x: (do.swiglu(x),)),
    ]
    for turn in _turns(ROWS, device, dtype, shape):
        split = partial(lambda turn, do, x: do.split_heads(x, turn), turn)
        cases.append((("queries", "keys", "values"), (ROWS, heads, shape.head_size), split))
    for names, size, case in cases:
        x = numbers(size, dtype, device)
        with torch.no_grad():
            for name, got, wanted in zip(names, case(made, x), case(plain, x), strict=True):
                yield from _difference(name, got, wanted)
        yield from _difference(f"gradient of {names[0]}", _gradient(case, made, x), _gradient(case, plain, x))


def _turns(rows: int, device: torch.device, dtype: torch.dtype, shape: Shape) -> Iterator[Turn]:
    angles = numbers((rows, 1, shape.head_size // 2), torch.float32, device) * 3.0
    for norm in (None, numbers((shape.heads + shape.kv_heads, shape.head_size), dtype, device)):
        yield Turn(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            cos_N1P=angles.cos().to(dtype),
            sin_N1P=angles.sin().to(dtype),
            norm_HD=norm,
            eps=EPS,
        )


def _gradient(case: Case, do: Operations, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        outputs = case(do, leaf)
        weights = [numbers(tuple(out.shape), out.dtype, out.device) for out in outputs]
        (gradient,) = torch.autograd.grad(outputs, leaf, weights)
    return gradient


def _difference(name: str, got: Tensor, wanted: Tensor) -> Iterator[str]:
    return kernel_trials.difference(name, got, wanted, TOLERANCE[wanted.dtype])


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeKernels:
    """Operations between products when one token per row is decoded, adapter and cache included.

    `add_norm` adds its second argument, if any, to x in place, and returns the norm of the sum. `heads` completes a
    product, splits it as `operations.split_heads` does, stores keys and values, and returns the queries. `swiglu`
    completes a product before it gates it.
    """

    add_norm: Callable[[Tensor, Tensor | None, Tensor, float], Tensor]
    heads: Callable[[LowRankSum, Turn, Target], Tensor]
    swiglu: Callable[[LowRankSum], Tensor]


def _add_norm(x_ND: Tensor, added_ND: Tensor | None, weight_D: Tensor, eps: float) -> Tensor:
    if added_ND is not None:
        x_ND += added_ND
    return operations.rms_norm(x_ND, weight_D, eps)


def _heads(product: LowRankSum, turn: Turn, target: Target) -> Tensor:
    size = 2 * turn.cos_N1P.shape[-1]
    queries_NHD, *new = operations.split_heads(product.total().view(len(product.y_NO), -1, size), turn)
    for cells, states in zip((target.keys_SKD, target.values_SKD), new, strict=True):
        cells.index_copy_(0, target.slots_B, states.to(cells.dtype))
    return queries_NHD


# The definitions that the kernels are compared with.
PLAIN = DecodeKernels(add_norm=_add_norm, heads=_heads, swiglu=lambda product: operations.swiglu(product.total()))


def _gated(product: LowRankSum) -> Tensor:
    return operations.swiglu(replace(product, y_NO=product.y_NO.clone()).total())


def _gated_back(product: LowRankSum, g: Tensor) -> Tensor:
    total = replace(product, y_NO=product.y_NO.clone()).total().requires_grad_()
    with torch.enable_grad():
        return torch.autograd.grad(operations.swiglu(total), total, g)[0]


PLAIN_GATES = Gates(forward=_gated, backward=_gated_back)


def fused_gates(device: torch.device, dtype: torch.dtype, shape: Shape, rank: int) -> Gates | None:
    place, given = "retrain_local.model.decode_triton:GATES", (device, dtype, shape, rank)
    found: Gates | None = proven("gates of training", device, place, lambda made: gate_faults(made, *given))
    return found


def gate_faults(made: Gates, device: torch.device, dtype: torch.dtype, shape: Shape, rank: int) -> Iterator[str]:
    for rows in DECODED_ROWS:
        g = numbers((rows, shape.inner), dtype, device)
        product = _product(rows, (shape.inner,) * 2, rank, g)
        with torch.no_grad():
            yield from _difference("training's gate", *(each.forward(product) for each in (made, PLAIN_GATES)))
            gradients = (each.backward(product, g) for each in (made, PLAIN_GATES))
            yield from _difference("gradient of training's gate", *gradients)


def fused_decode(device: torch.device, dtype: torch.dtype, shape: Shape, rank: int) -> DecodeKernels | None:
    place, given = "retrain_local.model.decode_triton:KERNELS", (device, dtype, shape, rank)
    found: DecodeKernels | None = proven("decoding kernels", device, place, lambda made: decode_faults(made, *given))
    return found


def decode_faults(
    made: DecodeKernels, device: torch.device, dtype: torch.dtype, shape: Shape, rank: int
) -> Iterator[str]:
    kv_heads, size = shape.kv_heads, shape.head_size
    with torch.no_grad():
        weight_D = numbers((shape.hidden,), dtype, device)
        for number_of_rows in DECODED_ROWS:
            x_ND, added_ND = (numbers((number_of_rows, shape.hidden), dtype, device) for _ in range(2))
            for added in (None, added_ND):
                sums = x_ND.clone(), x_ND.clone()
                norms = (each.add_norm(x, added, weight_D, EPS) for each, x in zip((made, PLAIN), sums, strict=True))
                yield from _difference("decoding's norm", *norms)
                yield from _difference("decoding's sum", *sums)
            got, wanted = (
                each.swiglu(_product(number_of_rows, (shape.inner,) * 2, rank, x_ND)) for each in (made, PLAIN)
            )
            yield from _difference("decoding's gate", got, wanted)
        sizes = shape.heads * size, kv_heads * size, kv_heads * size
        for turn in chain.from_iterable(_turns(rows, device, dtype, shape) for rows in DECODED_ROWS):
            rows, found = len(turn.cos_N1P), []
            for each in (made, PLAIN):
                cells = [torch.zeros(rows + 2, kv_heads, size, dtype=dtype, device=device) for _ in range(2)]
                slots_B = torch.arange(rows, 0, -1, device=device)
                target = Target(keys_SKD=cells[0], values_SKD=cells[1], slots_B=slots_B)
                found.append((each.heads(_product(rows, sizes, rank, weight_D), turn, target), *cells))
            for name, one, other in zip(("queries", "keys", "values"), *found, strict=True):
                yield from _difference(f"decoding's {name}", one, other)


def _product(rows: int, sizes: tuple[int, ...], rank: int, like: Tensor) -> LowRankSum:
    outputs, columns = sum(sizes), len(sizes) * rank
    product = numbers((rows, outputs + stacked_rows(columns)), like.dtype, like.device)
    return LowRankSum(
        y_NO=product[:, :outputs],
        inner_NR=product[:, outputs : outputs + columns],
        b_OR=numbers((outputs, rank), like.dtype, like.device) * rank**-0.5,
        sizes=sizes,
    )
