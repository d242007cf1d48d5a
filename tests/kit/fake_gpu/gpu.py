"""A GPU that is not there: real host code runs on fake CUDA tensors, which have a shape, a dtype and a device.

PyTorch's FakeTensorMode infers the outputs of an operation and raises where devices are mixed. This mode on top of it
counts. It is blind to numbers, races between streams, and NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.kit.fake_gpu.card import H100, Card
from tests.kit.fake_gpu.cuda_calls import cuda_replaced
from tests.kit.fake_gpu.graph import FakeGraph
from tests.kit.fake_gpu.host_reads import host_reads_replaced, host_value
from tests.kit.fake_gpu.memory import Memory
from tests.kit.fake_gpu.record import Fault, Place, Record, Wait, place_of_caller
from tests.kit.fake_gpu.triton_calls import triton_replaced
from tests.kit.fake_gpu.work import Work, work_of

# The sizes of their results depend on numbers, or the results are Python numbers.
WAITING = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "nonzero", "_unique2", "unique_dim", "unique_consecutive", "masked_select"),
        *("bincount", "equal", "is_nonzero"),
    )
)
PRODUCTS = frozenset(f"aten::{name}" for name in ("mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_"))
COPIES = frozenset(f"aten::{name}" for name in ("_to_copy", "copy_", "copy"))
INDEXING = ("aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
ALLOCATIONS = ("empty", "new_empty", "lift_fresh", "detach_")
# Pinned memory is the mode's own business: a build without CUDA cannot pin.
PIN, IS_PINNED = "aten::_pin_memory", "aten::is_pinned"


class _NoContext(FakeTensorMode):  # type: ignore[misc]
    avoid_device_init = True  # although torch.cuda.is_available says that there is a device


class FakeGpu(TorchDispatchMode):  # type: ignore[misc]
    """`record` and `memory` hold the counts; `phase` names the part of the run that they belong to.

    `weighs` counts the bytes and operations of each launch too.
    """

    def __init__(self, card: Card = H100, *, weighs: bool = False) -> None:
        super().__init__()
        self.weighs = weighs
        self.card, self.memory, self.record = card, Memory(card), Record()
        self.phase = "start"
        self.capturing: FakeGraph | None = None
        self._fake = _NoContext(allow_non_fake_inputs=True)
        self._is_basic: dict[Any, bool] = {}
        self._pinned: dict[int, Tensor] = {}

    @contextmanager
    def in_place(self) -> Iterator[FakeGpu]:
        """Run a block on this GPU; it is not re-entrant."""
        with ExitStack() as stack:
            for module in (optimizer, _foreach_utils):
                # Otherwise an optimizer would take the path of one launch for each fake parameter.
                types = [*module._foreach_supported_types, FakeTensor]
                stack.enter_context(mock.patch.object(module, "_foreach_supported_types", types))
            for replaced in (cuda_replaced, host_reads_replaced, triton_replaced):
                stack.enter_context(replaced(self))
            stack.enter_context(self._fake)
            stack.enter_context(self)
            yield self

    def waits(self, what: str) -> None:
        place = place_of_caller()
        self.record.waits[Wait(phase=self.phase, what=what, place=place)] += 1
        if self.capturing is not None:
            self.capturing.is_broken = True
            self.fault("capture", f"{what} while a graph is captured", place)
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing")

    def fault(self, kind: str, what: str, place: Place) -> None:
        self.record.faults.append(Fault(kind=kind, what=what, phase=self.phase, place=place))

    def launches(self, name: str, place: Place, tensors: Sequence[Tensor], outputs: Sequence[Tensor] = ()) -> None:
        """Count a launch; those of a capture are counted when the graph is replayed."""
        work = work_of(name, tensors, outputs) if self.weighs else Work()
        if (graph := self.capturing) is not None:
            graph.launched[name] += 1
            graph.work[name, place.function] = graph.work.get((name, place.function), Work()) + work
        else:
            self.record.operations[self.phase, name] += 1
            key = self.phase, name, place.function
            self.record.work[key] = self.record.work.get(key, Work()) + work

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given, name = dict(kwargs or {}), func._schema.name
        if func not in self._is_basic:
            self._is_basic[func] = not (func.namespace == "aten" and func._can_decompose())
        if not self._is_basic[func]:  # inference mode hands composite operations over whole
            with self:
                found = func.decompose(*args, **given)
            if found is not NotImplemented:
                return found
        if name in (PIN, IS_PINNED) or given.get("pin_memory"):
            return self._pinning(func, name, args, given)
        inputs = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor)]
        on_card = any(x.is_cuda for x in inputs)
        if on_card and (waited := _reason_to_wait(name, args)):
            self.waits(waited)
        if name == "aten::_local_scalar_dense":
            return host_value(args[0]) if on_card or isinstance(args[0], FakeTensor) else func(*args, **given)
        if on_card and name in _BY_NUMBERS:
            return _BY_NUMBERS[name](args[0])
        out = func(*_without_masks(name, self._without_constant(name, args, given)), **given)
        outputs = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if name in COPIES:
            self._copied(args[name != "aten::_to_copy"], outputs[0], args, given)
        if on_card or any(x.is_cuda for x in outputs):
            self._note(func, name, inputs, outputs)
        return out

    def _without_constant(self, name: str, args: Sequence[Any], given: Mapping[str, Any]) -> Sequence[Any]:
        # FakeTensorMode computes with small constants of the host, on the device as well.
        is_real = name == "aten::_to_copy" and not isinstance(args[0], FakeTensor)
        if not is_real or torch.device(given.get("device") or "cpu").type != "cuda":
            return args
        source = self._fake.from_tensor(args[0])
        source.constant = None
        return (source, *args[1:])

    def _pinning(self, func: Any, name: str, args: Sequence[Any], given: dict[str, Any]) -> Any:
        if name == IS_PINNED:
            return self._is_pinned(args[0])
        pinned = func(*args, **given) if given.pop("pin_memory", False) else args[0].clone()
        self._pinned[pinned.untyped_storage()._cdata] = pinned
        return pinned

    def _is_pinned(self, x: Tensor) -> bool:
        return x.untyped_storage()._cdata in self._pinned

    def _copied(self, source: Tensor, target: Tensor, args: Sequence[Any], given: Mapping[str, Any]) -> None:
        if source.device.type == target.device.type:
            return
        host = target if source.is_cuda else source
        is_asynchronous = bool(given.get("non_blocking") or (len(args) > 2 and args[2] is True))
        direction = f"copy {source.device.type} to {target.device.type}"
        # Without pinned memory the host waits at least until the driver has staged the numbers.
        if not (is_asynchronous and self._is_pinned(host)):
            self.waits(direction)
        self.record.operations[self.phase, direction] += 1

    def _note(self, func: Any, name: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        place, short = place_of_caller(), name.removeprefix("aten::")
        if not (func.is_view or func.namespace == "prim" or short.startswith(ALLOCATIONS)):
            self.launches(short, place, inputs, outputs)
        if (graph := self.capturing) is not None:
            for x in inputs:
                if x.is_cuda:
                    graph.reads(x, place)
                elif x.dim() and name != "aten::lift_fresh":
                    self.fault("capture", f"{short} reads a tensor of the host", place)
        for x in outputs:
            if x.is_cuda and isinstance(x, FakeTensor):
                self.owns(x)
        if name in PRODUCTS:
            dtypes = tuple(str(x.dtype).removeprefix("torch.") for x in inputs)
            self.record.products[self.phase, dtypes] += 1
            if len(set(dtypes)) > 1:  # the meta kernels accept it
                self.fault("dtype", f"{short} of {' x '.join(dtypes)}", place)

    def owns(self, x: Tensor) -> None:
        key = self.memory.own(x, self.phase, in_graph=self.capturing is not None)
        if key is not None and self.capturing is not None:
            self.capturing.makes(key)
            self.capturing.peak = max(self.capturing.peak, self.memory.in_capture)


def _reason_to_wait(name: str, args: Sequence[Any]) -> str:
    if name == "aten::_local_scalar_dense":
        return "item" if args[0].is_cuda else ""
    if name == "aten::histc" and (len(args) < 4 or args[2] == args[3]):
        return "histc"  # it reads its bounds from the numbers
    if name in WAITING:
        return name.removeprefix("aten::")
    if name in INDEXING:
        indices = [i for i in args[1] if isinstance(i, Tensor)]
        if any(i.dtype == torch.bool for i in indices):
            return "index by a mask"
        if any(not i.is_cuda for i in indices):
            return "index from the host"
    return ""


def _positions(x: Tensor) -> Tensor:
    return x.new_zeros(x.numel(), x.dim(), dtype=torch.int64)


# Results whose values or sizes only a device would know: nothing is equal, every number is true, there are eight bins.
_BY_NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "aten::equal": lambda x: False,
    "aten::nonzero": _positions,
    "aten::bincount": lambda x: x.new_zeros(8, dtype=torch.int64),
}


def _without_masks(name: str, args: Sequence[Any]) -> Sequence[Any]:
    """Replace the masks of an index by the positions that are true, as PyTorch's kernels do."""
    if name not in INDEXING:
        return args
    found: list[Any] = []
    for index in args[1]:
        is_mask = isinstance(index, Tensor) and index.dtype == torch.bool
        found += _positions(index).unbind(1) if is_mask else [index]
    return (args[0], found, *args[2:])
