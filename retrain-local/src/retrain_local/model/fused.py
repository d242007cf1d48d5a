"""Fused kernels between the matrix products of a layer, used where Triton is available and a check passes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from retrain_local.decoder import Shape
from retrain_local.model.operations import Operations, Turn

log = logging.getLogger("retrain")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # of the largest element
EPS = 1e-6
ROWS = 3
Case = Callable[[Operations, Tensor], tuple[Tensor, ...]]


def fused_operations(device: torch.device, dtype: torch.dtype, shape: Shape) -> Operations:
    """Fused kernels on this device, for sampling and training, or else PyTorch's operations."""
    place = "retrain_local.model.training_triton:OPERATIONS"
    return proven("fused kernels", device, place, lambda made: faults(made, device, dtype, shape)) or Operations()


def proven(name: str, device: torch.device, place: str, faults_of: Callable[[Any], Iterator[str]]) -> Any:
    """The kernels at `place` (`module:name`) if this device can run them and they have no faults, else None.

    A warning if they should work and do not.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0) or find_spec("triton") is None:
        return None
    try:
        module, _, attribute = place.partition(":")
        made = getattr(import_module(module), attribute)
        fault = next(faults_of(made), None)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # compilers raise exceptions of any class
        fault = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
    if fault is None:
        return made
    log.warning("%s are not used on %s: %s", name, device, fault)
    return None


def faults(made: Operations, device: torch.device, dtype: torch.dtype, shape: Shape) -> Iterator[str]:
    """Where these or their gradients differ from PyTorch's operations on a few rows of the decoder's sizes."""
    plain = Operations()
    half = shape.head_size // 2
    heads = shape.heads + 2 * shape.kv_heads
    weight, angles = numbers((shape.hidden,), dtype, device), numbers((ROWS, 1, half), torch.float32, device) * 3.0
    norms = None, numbers((shape.heads + shape.kv_heads, shape.head_size), dtype, device)
    turns = [
        Turn(
            heads=shape.heads,
            kv_heads=shape.kv_heads,
            cos_N1P=angles.cos().to(dtype),
            sin_N1P=angles.sin().to(dtype),
            norm_HD=norm,
            eps=EPS,
        )
        for norm in norms
    ]
    cases: list[tuple[tuple[str, ...], tuple[int, ...], Case]] = [
        (("norm",), (ROWS, shape.hidden), lambda do, x: (do.rms_norm(x, weight, EPS),)),
        (("gate",), (ROWS, 2 * shape.inner), lambda do, x: (do.swiglu(x),)),
    ]
    for turn in turns:
        cases.append((("queries", "keys", "values"), (ROWS, heads, shape.head_size), partial(_split, turn)))
    for names, size, case in cases:
        x = numbers(size, dtype, device)
        with torch.no_grad():
            for name, got, wanted in zip(names, case(made, x), case(plain, x), strict=True):
                yield from difference(name, got, wanted)
        yield from difference(f"gradient of {names[0]}", _gradient(case, made, x), _gradient(case, plain, x))


def _split(turn: Turn, operations: Operations, x: Tensor) -> tuple[Tensor, ...]:
    return operations.split_heads(x, turn)


def _gradient(case: Callable[[Operations, Tensor], tuple[Tensor, ...]], operations: Operations, x: Tensor) -> Tensor:
    """Of the outputs, each weighed by numbers of its own."""
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        outputs = case(operations, leaf)
        weights = [numbers(tuple(out.shape), out.dtype, out.device) for out in outputs]
        (gradient,) = torch.autograd.grad(outputs, leaf, weights)
    return gradient


def difference(name: str, got: Tensor, wanted: Tensor) -> Iterator[str]:
    gap, largest = float((got.float() - wanted.float()).abs().max()), float(wanted.float().abs().max())
    if not gap <= TOLERANCE[wanted.dtype] * largest:  # True for a NaN as well
        yield f"{name} off by {gap:.2g}, of {largest:.2g} at most"


def numbers(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Between -2 and 2, the same on every device."""
    return (2 * torch.sin(torch.arange(math.prod(size), dtype=torch.float64) * 1.7)).view(size).to(device, dtype)
