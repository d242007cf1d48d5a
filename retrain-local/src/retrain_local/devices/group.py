"""The ranks of one policy as a rank sees them: results gathered, gradients summed, tensors whole or sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from retrain.api import BackendError, Config, Problem
from retrain_local.devices.torch_devices import Devices, parallel_mode
from retrain_local.memory.sizes import runs

T = TypeVar("T")
# Numbers that are summed at a time: a flat copy of all gradients would be as large as the model.
BUCKET = 2**26
# PyTorch's own limit for a rank that is alive and slow; one that has ended is noticed at once.
TIMEOUT_S = 1800.0


class PeerFailedError(BackendError):
    """Another rank failed, so this one could not continue; the failure of that rank is the one to report."""

    def __init__(self, rank: int, text: str) -> None:
        fix = "read the error of that rank, correct its cause, and continue with --resume"
        super().__init__(Problem(code="backend.rank-failed", where=f"rank {rank}", what=text, fix=fix))
        self.rank, self._text = rank, text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self._text)


class Group:
    """All ranks; this one is `rank` of `size`. The base class is the one process of a run without ranks.

    Every rank calls the same methods in the same order.
    `shards`: each rank holds a part of every trained weight, so that all must compute at the same time.
    `is_broken`: this rank failed where the others cannot know it, so no rank can continue.
    `mesh`: the device mesh of the shards, if any.
    """

    rank = 0
    size = 1
    shards = False
    is_broken = False
    mesh: Any = None

    def gathered(self, work: Callable[[], T]) -> list[T]:
        """Return the results of `work` on each rank, in order; where it raises, all ranks raise."""
        return [work()]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Surround work in which ranks compute together: an error on this rank only breaks the group."""
        yield

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Replace these tensors, of the same shapes on every rank, by their sums over all ranks."""


ALONE = Group()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    text: str


class ProcessGroup(Group):
    """Ranks of `torch.distributed`: gloo for objects, and for sums gloo on CPUs and NCCL on GPUs; one per process."""

    def __init__(self, store: Any, *, rank: int, size: int, devices: Sequence[torch.device], shards: bool) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            what, fix = "this process belongs to a torch.distributed group already", "start the run in its own process"
            raise BackendError(Problem(code="backend.second-group", where="[backend] devices", what=what, fix=fix))
        self.rank, self.size, self.shards = rank, size, shards
        timeout = timedelta(seconds=TIMEOUT_S)
        self.uses_gpus = devices[0].type == "cuda"
        # NCCL accepts each GPU once; gloo sums tensors of a GPU through the host
        is_nccl = self.uses_gpus and len(set(devices)) == size
        given = {"rank": rank, "world_size": size, "store": store, "timeout": timeout}
        if self.uses_gpus:
            torch.cuda.set_device(devices[rank])  # NCCL and the mesh take the current one
        dist.init_process_group("nccl" if is_nccl else "gloo", **given)
        self.mesh = dist.init_device_mesh(devices[0].type, (size,)) if shards else None
        self._agreed: BaseException | None = None
        self._control = dist.new_group(backend="gloo", timeout=timeout) if is_nccl else dist.group.WORLD

    def gathered(self, work: Callable[[], T]) -> list[T]:
        try:
            own = work()
        except BaseException as error:
            self._agreed = error
            if self.is_broken:
                raise
            # If a rank is gone, the error of this one is still the one to report.
            with suppress(RuntimeError):
                self._exchanged(_Failed(text=f"{type(error).__name__}: {error}"))
            raise
        found = self._exchanged(own)
        for rank, each in enumerate(found):
            if isinstance(each, _Failed):
                self._agreed = PeerFailedError(rank, each.text)
                raise self._agreed
        return found

    @contextmanager
    def in_step(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.is_broken = self.shards and error is not self._agreed
            raise

    def add(self, gradients: Sequence[Tensor]) -> None:
        import torch.distributed as dist

        for some in runs(gradients, BUCKET, Tensor.numel):
            flat = torch.cat([each.reshape(-1) for each in some])
            dist.all_reduce(flat)
            for each, total in zip(some, flat.split([each.numel() for each in some]), strict=True):
                each.copy_(total.view_as(each))

    def abort(self) -> None:
        """Abort operations that wait for a rank that is gone; gloo notices by itself, NCCL does not."""
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()

    def leave(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _exchanged(self, own: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._control)
        return found


def join(store: Any, rank: int, devices: Devices, config: Config) -> ProcessGroup:
    shards = parallel_mode(config) == "fsdp"
    return ProcessGroup(store, rank=rank, size=len(devices.ranks), devices=devices.ranks, shards=shards)


def open_store(port: int, *, is_master: bool) -> Any:
    """Open the store through which ranks find each other on this machine; `port` 0 lets the system choose."""
    from torch.distributed import TCPStore

    given = {"is_master": is_master, "wait_for_workers": False, "timeout": timedelta(seconds=TIMEOUT_S)}
    return TCPStore("127.0.0.1", port, None, **given)


def whole(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or all parts of a sharded one together; every rank calls it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def own_part(tensor: Tensor) -> Tensor:
    """Return the tensor itself, or this rank's part of a sharded one, in the same memory."""
    part = getattr(tensor, "to_local", None)
    return tensor if part is None else part()


def gathered(tensors: Mapping[str, Tensor], *, keep: bool) -> dict[str, Tensor]:
    """Return whole tensors by name, sharded ones in CPU memory; without `keep` only contribute this rank's parts."""
    found = {}
    for name, tensor in tensors.items():
        full = whole(tensor)
        if keep:
            found[name] = full if full is tensor else full.cpu()
    return found


def like(parameter: Tensor, full: Tensor) -> Tensor:
    """Move a whole tensor to the device of the parameter, and shard it in the same way; each rank has all numbers."""
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return full.to(parameter.device)
    from torch.distributed.tensor import distribute_tensor

    sharded: Any = parameter
    return distribute_tensor(full.to(own_part(parameter).device), mesh, sharded.placements)


def put(target: Tensor, full: Tensor) -> None:
    """Copy a whole tensor into a parameter, or this rank's part of it into its part."""
    with torch.no_grad():
        own_part(target.detach()).copy_(own_part(like(target, full)))
