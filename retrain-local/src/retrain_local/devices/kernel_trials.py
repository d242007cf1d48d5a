"""Kernels on trial: compared with plain PyTorch on a few numbers of the device that they will run on, before use."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pkgutil import resolve_name
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("retrain")


def proven(name: str, device: torch.device, place: str, faults_of: Callable[[Any], Iterator[str]]) -> Any:
    """Return the kernels at `place` (`module:name`), or None, with a warning, if they have a fault on this device."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 0) or find_spec("triton") is None:
        return None

    def faults() -> Iterator[str]:
        yield from faults_of(resolve_name(place))

    if (fault := first_fault(faults())) is None:
        return resolve_name(place)
    log.warning("%s are not used on %s: %s", name, device, fault)
    return None


def first_fault(faults: Iterator[str]) -> str | None:
    """Return the first fault, or the error that a kernel failed with; None if there is neither."""
    try:
        return next(faults, None)
    except torch.OutOfMemoryError:
        raise
    # Kernel compilers and launchers raise exceptions of any class.
    except Exception as error:
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def difference(name: str, got: Tensor, wanted: Tensor, tolerance: float) -> Iterator[str]:
    """Yield a sentence if the largest gap exceeds `tolerance` times the largest wanted number."""
    gap, largest = float((got.float() - wanted.float()).abs().max()), float(wanted.float().abs().max())
    if not gap <= tolerance * largest:  # True for a NaN as well
        yield f"{name} off by {gap:.2g}, of {largest:.2g} at most"


def numbers(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return numbers between -2 and 2, the same on every device."""
    return (2 * torch.sin(torch.arange(math.prod(size), dtype=torch.float64) * 1.7)).view(size).to(device, dtype)


def dense(x: Tensor) -> Tensor:
    """Return the tensor, copied if its last axis has a stride; kernels are given the strides of the other axes."""
    return x if x.stride(-1) == 1 else x.contiguous()


def on_device_of(x: Tensor) -> torch.cuda.device:
    """Make the device of `x` current, where Triton launches its kernels; -1 leaves it unchanged (the interpreter)."""
    return torch.cuda.device(x.device if x.is_cuda else -1)
