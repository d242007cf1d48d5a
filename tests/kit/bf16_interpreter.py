"""Triton's interpreter with bf16: it stores bf16 numbers as integers, and would compute on their bits.

Here each operation computes in fp32 and rounds to the nearest bf16, as kernels do. 8-bit floats are converted by
PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
QUIET_NAN = np.uint16(0x7FC0)
WIDE = (tl.float16, tl.float32, tl.float64)


def widened(bits: Any) -> Any:
    """Return the fp32 numbers of bf16 bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def narrowed(numbers: Any) -> Any:
    """Return the bits of the nearest bf16 numbers, ties to even."""
    bits = np.ascontiguousarray(numbers, dtype=np.float32).view(np.uint32)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(numbers), QUIET_NAN, rounded)


def _is_bf16(handle: Any) -> bool:
    return bool(handle.dtype.scalar == tl.bfloat16)


def _wide(handle: Any) -> Any:
    return Handle(widened(handle.data), tl.float32) if _is_bf16(handle) else handle


@contextmanager
def bf16_interpreted() -> Iterator[None]:
    """Run a block of interpreted kernels with bf16."""
    binary, unary, dot = Builder.binary_op, Builder.unary_op, Builder.create_dot

    def binary_op(self: Any, left: Any, right: Any, op: Callable[..., Any]) -> Any:
        if not (_is_bf16(left) and _is_bf16(right)):
            return binary(self, left, right, op)
        out = op(widened(left.data), widened(right.data))
        return Handle(out if out.dtype == bool else narrowed(out), left.dtype.scalar)

    def unary_op(self: Any, given: Any, op: Callable[..., Any]) -> Any:
        if not _is_bf16(given):
            return unary(self, given, op)
        return Handle(narrowed(op(widened(given.data))), given.dtype.scalar)

    def create_dot(self: Any, a: Any, b: Any, total: Any, *given: Any) -> Any:
        return dot(self, _wide(a), _wide(b), total, *given)

    def converted(self: Any, source: Any, target: Any) -> Any:
        return self.cast_impl(source, target)

    replaced = {
        "binary_op": binary_op,
        "unary_op": unary_op,
        "create_dot": create_dot,
        "cast_impl": _converting(Builder.cast_impl),
        "create_fp_to_fp": _converting(Builder.create_fp_to_fp),
        "create_fp_trunc": converted,
        "create_fp_ext": converted,
    }
    with ExitStack() as stack:
        for name, made in replaced.items():
            stack.enter_context(mock.patch.object(Builder, name, made))
        yield


def _converting(before: Callable[..., Any]) -> Callable[..., Any]:
    """Return a conversion that knows bf16 and e4m3 floats, and leaves others to `before`."""

    def convert(self: Any, source: Any, target: Any, *given: Any) -> Any:
        of, to = source.dtype.scalar, target.scalar
        if to == tl.float8e4nv and of in (*WIDE, tl.bfloat16):
            numbers = np.ascontiguousarray(_wide(source).data, dtype=np.float32)
            cells = torch.from_numpy(numbers).to(torch.float8_e4m3fn)
            return Handle(cells.view(torch.uint8).numpy(), to)
        if of == tl.float8e4nv:
            numbers = torch.from_numpy(np.ascontiguousarray(source.data)).view(torch.float8_e4m3fn).float().numpy()
        elif of == tl.bfloat16 and to in (tl.float32, tl.float64):
            numbers = widened(source.data)
        elif to == tl.bfloat16 and of in WIDE:
            numbers = source.data.astype(np.float32)
        else:
            return before(self, source, target, *given)
        return Handle(narrowed(numbers) if to == tl.bfloat16 else numbers.astype(interpreter._get_np_dtype(target)), to)

    return convert
