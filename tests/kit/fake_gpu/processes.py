"""Put Python processes of a command on a fake GPU: a `sitecustomize.py` on their path calls `enter`."""

from __future__ import annotations

import atexit
import sys
from collections import defaultdict
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from tests.kit.fake_gpu.gpu import FakeGpu
    from tests.kit.fake_gpu.work import Work

SCRIPTS = ("gpu_part.py", "rates.py", "retrain")
QUESTION = "torch.cuda.is_available"  # in a command after -c


def enter() -> None:
    """Stay on the fake GPU until this process ends, if it is one that would use a GPU."""
    if not any(Path(word).name in SCRIPTS or QUESTION in word for word in sys.orig_argv[1:]):
        return
    import torch.profiler

    from tests.kit.fake_gpu.gpu import FakeGpu
    from tests.kit.fake_gpu.models import weights_unread

    gpu, stack = FakeGpu(weighs=True), ExitStack()
    atexit.register(stack.close)
    stack.enter_context(weights_unread())
    stack.enter_context(mock.patch.object(torch.profiler, "profile", return_value=FakeProfile(gpu)))
    stack.enter_context(gpu.in_place())


class FakeProfile:
    """In place of `torch.profiler.profile`: a block's launches with their least times by bytes and operations."""

    def __init__(self, gpu: FakeGpu) -> None:
        self._gpu = gpu

    def __enter__(self) -> FakeProfile:
        self._before = dict(self._gpu.record.work)
        return self

    def __exit__(self, *given: object) -> None: ...

    def key_averages(self) -> list[Any]:
        found: defaultdict[str, list[Work]] = defaultdict(list)
        for key, work in self._gpu.record.work.items():
            found[key[1]].append(work - self._before[key] if key in self._before else work)
        card = self._gpu.card
        return [
            SimpleNamespace(
                key=name,
                count=sum(work.calls for work in works),
                self_device_time_total=1e6
                * sum(work.seconds(card.bytes_per_s, card.operations_per_s) for work in works),
                device_type="DeviceType.CUDA",
            )
            for name, works in found.items()
        ]
