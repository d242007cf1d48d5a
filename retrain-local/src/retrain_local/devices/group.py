"""The ranks of one policy as a rank sees them: what each has found, put together, and gradients summed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor

from retrain.api import BackendError, Config, Problem
from retrain_local.devices.choose import Devices, parallel_mode

T = TypeVar("T")
TensorT = TypeVar("TensorT", bound=Tensor)
BUCKET = 2**26  # numbers that are summed at a time: a copy of all gradients would be as large as the model
TIMEOUT_S = 1800.0  # PyTorch's own: how long a rank waits for one that is alive and slow


class PeerFailedError(BackendError):
    """Another rank failed, so this one could not go on; the failure of that rank is the one to report."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(Problem(where=f"rank {rank}", what=text, fix="see the error of that rank"))
        self.rank, self._text = rank, text

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.rank, self._text)


class Group:
    """All ranks, this one being `rank` of `size`; here the one process of a run without ranks.

    Every rank calls the same methods in the same order.
    `shards`: whether each rank holds a part of every trained weight, so that all must compute at the same time.
    `is_broken`: this rank failed where the others cannot know it, so none can go on.
    `mesh`: the device mesh of the shards, None without.
    """

    rank = 0
    size = 1
    shards = False
    is_broken = False
    mesh: Any = None

    def gathered(self, work: Callable[[], T]) -> list[T]:
        """The results of `work` on each rank, in order; where it raises, all ranks raise and nothing is summed."""
        return [work()]

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """Around work in which ranks compute together: an error that only this rank has breaks the group."""
        yield

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Replace these tensors, of the same shapes on every rank, by their sums over all ranks."""


ALONE = Group()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failed:
    text: str


class ProcessGroup(Group):
    """Ranks joined through `torch.distributed`: gloo for what is said, and for sums gloo on CPUs and NCCL on GPUs."""

    def __init__(self, store: Any, *, rank: int, size: int, devices: Sequence[torch.device], shards: bool) -> None:
        """`store` is the `TCPStore` of rank 0. BackendError where this process has a process group already."""
        import torch.distributed as dist

        if dist.is_initialized():
            what = "this process belongs to a torch.distributed group already"
            raise BackendError(Problem(where="[backend] devices", what=what, fix="start the run in its own process"))
        self.rank, self.size, self.shards = rank, size, shards
        timeout = timedelta(seconds=TIMEOUT_S)
        self.uses_gpus = devices[0].type == "cuda"
        # NCCL takes a GPU once; gloo sums tensors of a GPU through the host
        is_nccl = self.uses_gpus and len(set(devices)) == size
        given = {"rank": rank, "world_size": size, "store": store, "timeout": timeout}
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
            with suppress(RuntimeError):  # a rank that is gone: the error at hand is the one to report
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
        """In buckets, each summed at once."""
        import torch.distributed as dist

        for some in buckets(gradients, BUCKET):
            flat = torch.cat([each.reshape(-1) for each in some])
            dist.all_reduce(flat)
            for each, total in zip(some, flat.split([each.numel() for each in some]), strict=True):
                each.copy_(total.view_as(each))

    def abort(self) -> None:
        """Give up what is waiting for a rank that is gone; gloo notices by itself, NCCL does not."""
        import torch.distributed as dist

        if dist.is_initialized() and dist.get_backend() == "nccl":
            dist.distributed_c10d._abort_process_group()

    def leave(self) -> None:
        """Leave the group; safe to call twice."""
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()

    def _exchanged(self, own: Any) -> list[Any]:
        import torch.distributed as dist

        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, own, group=self._control)
        return found


def buckets(tensors: Iterable[TensorT], most: int) -> Iterator[list[TensorT]]:
    """Runs of tensors with at most `most` numbers, or one tensor that has more."""
    some: list[TensorT] = []
    numbers = 0
    for each in tensors:
        numbers += each.numel()
        if some and numbers > most:
            yield some
            some, numbers = [], each.numel()
        some.append(each)
    if some:
        yield some


def join(store: Any, rank: int, devices: Devices, config: Config) -> ProcessGroup:
    """The group of these devices' ranks, once all have called this."""
    shards = parallel_mode(config) == "fsdp"
    return ProcessGroup(store, rank=rank, size=len(devices.ranks), devices=devices.ranks, shards=shards)


def open_store(port: int, *, is_master: bool) -> Any:
    """The store through which ranks find each other on this machine; `port` 0 lets the system choose."""
    from torch.distributed import TCPStore

    given = {"is_master": is_master, "wait_for_workers": False, "timeout": timedelta(seconds=TIMEOUT_S)}
    return TCPStore("127.0.0.1", port, None, **given)


def torchrun_environment(rank: int, size: int, port: int) -> Mapping[str, str]:
    """What torchrun sets for the processes that it starts on one machine."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {**os.environ, **{name: str(number) for name, number in numbers.items()}, "MASTER_ADDR": "127.0.0.1"}
