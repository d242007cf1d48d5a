"""Numbers of fake tensors as the host reads them: zeros, and a wait where the tensor is on the card."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

if TYPE_CHECKING:
    from tests.kit.fake_gpu.gpu import FakeGpu

NUMPY = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int64: np.int64,
    torch.int32: np.int32,
    torch.int16: np.int16,
    torch.bool: np.bool_,
}


def host_value(x: Tensor) -> Any:
    """Return the number of a tensor with one element: 0 or True from the card; from the host its constant, or 1."""
    if x.is_cuda:
        return True if x.dtype == torch.bool else 0.0 if x.dtype.is_floating_point else 0
    constant = getattr(x, "constant", None)
    # An optimizer divides by a power of its step number.
    return (1.0 if x.dtype.is_floating_point else 1) if constant is None else constant.item()


@contextmanager
def host_reads_replaced(gpu: FakeGpu) -> Iterator[None]:
    """Replace `tolist`, `numpy` and `data_ptr` of fake tensors, and the address (0) and `resize_` of their storages."""
    real = {name: getattr(Tensor, name) for name in ("tolist", "numpy", "data_ptr")}

    def tolist(x: Tensor) -> Any:
        if not isinstance(x, FakeTensor):
            return real["tolist"](x)
        if x.is_cuda:
            gpu.waits("tolist")
        return np.zeros(tuple(x.shape), np.float64 if x.dtype.is_floating_point else np.int64).tolist()

    def numpy(x: Tensor, *given: Any, **named: Any) -> Any:
        if not isinstance(x, FakeTensor):
            return real["numpy"](x, *given, **named)
        if x.is_cuda:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu()")
        return np.zeros(tuple(x.shape), NUMPY[x.dtype])

    def data_ptr(x: Tensor) -> int:
        if not isinstance(x, FakeTensor):
            return int(real["data_ptr"](x))
        return int(x.untyped_storage()._cdata + x.storage_offset() * x.element_size())

    address = torch.UntypedStorage.data_ptr

    def storage_address(storage: torch.UntypedStorage) -> int:
        return int(storage._cdata if storage.device.type == "meta" else address(storage))

    resize = torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        found = resize(storage, size)
        gpu.memory.resize(storage, gpu.phase)
        return found

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "data_ptr", storage_address))
        stack.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", resized))
        for name, made in (("tolist", tolist), ("numpy", numpy), ("data_ptr", data_ptr)):
            for owner in (Tensor, *([FakeTensor] if name in FakeTensor.__dict__ else [])):
                stack.enter_context(mock.patch.object(owner, name, made))
        yield
