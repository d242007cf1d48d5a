"""Launches of Triton kernels: recorded and checked in place of Triton's launcher."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any
from unittest import mock

from torch import Tensor

from tests.kit.fake_gpu.record import Argument, Launch, Place, place_of_caller

if TYPE_CHECKING:
    from tests.kit.fake_gpu.gpu import FakeGpu

ALIGNED_BYTES = 16  # Triton compiles another variant for pointers and integers that are no multiple of it
MOST_PROGRAMS = 65_535  # along the second and third axis of a grid
# Arguments of which a kernel reads or writes the rows that other arguments name; their work is left out.
POOLS = dict.fromkeys(("attend", "store", "_heads"), ("keys", "values", "key_scales", "value_scales"))
LAUNCHER_ARGUMENTS = ("warmup", "grid")


@contextmanager
def triton_replaced(gpu: FakeGpu) -> Iterator[None]:
    if find_spec("triton") is None:
        yield
        return
    from triton.runtime.jit import JITFunction

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **named: Any) -> None:
        launched(gpu, kernel, tuple(grid), args, named)

    with mock.patch.object(JITFunction, "run", run):
        yield


def launched(gpu: FakeGpu, kernel: Any, grid: tuple[Any, ...], args: Sequence[Any], named: Mapping[str, Any]) -> None:
    place, names = place_of_caller(), [each.name for each in kernel.params]
    given = dict(zip(names, args, strict=False)) | {name: value for name, value in named.items() if name in names}
    found: dict[str, Argument] = {}
    for each in kernel.params:
        if each.name not in given:
            gpu.fault("triton", f"{kernel.__name__} lacks {each.name}", place)
            continue
        value = given[each.name]
        found[each.name] = Argument(kind="constant", value=value) if each.is_constexpr else _argument(value)
        if isinstance(value, Tensor):
            _check_pointer(gpu, kernel.__name__, value, place)
        elif found[each.name].kind == "unknown":
            gpu.fault("triton", f"{kernel.__name__}: {each.name} is a {type(value).__name__}", place)
    if any(not isinstance(n, int) or n < 1 for n in grid) or any(n > MOST_PROGRAMS for n in grid[1:]):
        gpu.fault("triton", f"{kernel.__name__} has the grid {grid}", place)
    options = {name: value for name, value in named.items() if name not in (*names, *LAUNCHER_ARGUMENTS)}
    launch = Launch(kernel=kernel, grid=grid, arguments=found, options=options, phase=gpu.phase, place=place)
    gpu.record.launches.append(launch)
    pools = POOLS.get(kernel.__name__, ())
    tensors = [each for name, each in given.items() if isinstance(each, Tensor) and name not in pools]
    gpu.launches(f"triton {kernel.__name__}", place, tensors)


def _check_pointer(gpu: FakeGpu, kernel: str, tensor: Tensor, place: Place) -> None:
    if not tensor.is_cuda:
        gpu.fault("device", f"{kernel} is given a tensor on {tensor.device}", place)
    elif gpu.capturing is not None:
        gpu.capturing.reads(tensor, place)


def _argument(value: Any) -> Argument:
    if isinstance(value, Tensor):
        offset_bytes = value.storage_offset() * value.element_size()
        return Argument(kind="pointer", value=value.dtype, is_aligned=offset_bytes % ALIGNED_BYTES == 0)
    for kind in (bool, int, float):  # a bool is an int
        if isinstance(value, kind):
            aligned = kind is int and value % ALIGNED_BYTES == 0
            return Argument(kind=kind.__name__, value=value, is_aligned=aligned)
    return Argument(kind="unknown", value=value)
