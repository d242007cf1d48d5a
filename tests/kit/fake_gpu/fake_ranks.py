"""One rank of two on a fake GPU, in one process: PyTorch's fake process group takes NCCL's place.

The other rank is taken to hold the same results, so sums and gathers have the sizes of real ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from retrain_local.backend import create_local
from retrain_local.devices.group import ProcessGroup
from retrain_local.devices.torch_devices import Devices
from tests.kit.fake_gpu.backends import OnCard
from tests.kit.fake_gpu.card import H100
from tests.kit.fake_gpu.gpu import FakeGpu
from tests.kit.fake_gpu.models import vocabulary_of, weights_unread
from tests.kit.local_backend import Local

T = TypeVar("T")
SIZE = 2


class TwoRanks(ProcessGroup):
    """Rank 0 of two."""

    def __init__(self, *, shards: bool) -> None:
        self.rank, self.size, self.shards = 0, SIZE, shards
        self.uses_gpus = True
        dist.init_process_group("fake", rank=0, world_size=SIZE, store=FakeStore())
        with _disable_current_modes():  # a mesh looks up its ranks in tensors of the host
            self.mesh = dist.init_device_mesh("cuda", (SIZE,)) if shards else None

    def gathered(self, work: Callable[[], T]) -> list[T]:
        return [work()] * SIZE


@contextmanager
def rank_of_two(folder: Path, parallel: str, **options: Any) -> Iterator[OnCard]:
    """Open the backend of rank 0; `parallel` is replicate or fsdp."""
    gpu, card = FakeGpu(replace(H100, count=SIZE)), torch.device("cuda", 0)
    local = Local(folder=folder, requests=())
    with weights_unread(), gpu.in_place():
        group = TwoRanks(shards=parallel == "fsdp")
        try:
            context = local.context(devices="gpu:0,gpu:1", lr=1e-5, **options)
            backend = create_local(context, Devices(samplers=(card,), trainer=card), group)
            yield OnCard(gpu=gpu, backend=backend, vocabulary=vocabulary_of(folder))
            backend.close()
        finally:
            group.leave()
