from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from retrain_local.devices.torch_devices import (
    ONE_THREAD_BELOW,
    limited_threads,
    pack_workers,
    packs_at_a_time,
    threads_for,
    training_threads,
)
from tests.kit.local_backend import Local

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def three_threads() -> Iterator[None]:
    with limited_threads(3):
        yield


@pytest.mark.usefixtures("three_threads")
def test_only_small_models_on_the_cpu_get_one_thread() -> None:
    assert threads_for(ONE_THREAD_BELOW - 1, CPU) == 1
    assert threads_for(ONE_THREAD_BELOW, CPU) == 3
    assert threads_for(1, GPU) == 3


@pytest.mark.usefixtures("three_threads")
def test_the_process_gets_its_number_back() -> None:
    def fail() -> None:
        with limited_threads(1):
            assert torch.get_num_threads() == 1
            raise ValueError("on purpose")

    with pytest.raises(ValueError, match="on purpose"):
        fail()
    assert torch.get_num_threads() == 3


def test_a_small_models_numbers_do_not_depend_on_the_number_of_cores(local: Local) -> None:
    reports = []
    for threads in (1, 2):
        with limited_threads(threads):
            backend = local.make()
            reports.append([])
            for step in range(2):
                reports[-1].append(backend.train(local.roll(backend, step=step)))
                backend.publish()
            assert torch.get_num_threads() == threads
    assert reports[0] == reports[1]


def test_every_core_computes_a_pack_with_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = ONE_THREAD_BELOW - 1, ONE_THREAD_BELOW
    monkeypatch.setattr("os.cpu_count", lambda: 8)
    with limited_threads(8):
        assert (pack_workers(small, CPU), training_threads(1, small, CPU)) == (2, 1)
        assert (pack_workers(large, CPU), training_threads(8, large, CPU)) == (8, 1)
        assert (pack_workers(1, GPU), training_threads(8, 1, GPU)) == (1, 8)
    with limited_threads(24):
        assert (pack_workers(large, CPU), training_threads(24, large, CPU)) == (8, 3)
    with limited_threads(1):  # as OMP_NUM_THREADS=1 does
        assert (pack_workers(large, CPU), training_threads(1, large, CPU)) == (1, 1)
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    assert pack_workers(1, CPU) == 1
    assert packs_at_a_time(1, CPU) == 2  # what rounding depends on does not depend on the cores


def test_packs_of_a_larger_model_are_computed_side_by_side_by_single_threads(
    local: Local, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("retrain_local.devices.torch_devices.ONE_THREAD_BELOW", 0)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    with limited_threads(2):
        backend = local.make(options={"micro_batch_tokens": 100})
        _, trainer = backend._open()
        threads: set[tuple[str, int]] = set()
        hidden = trainer._decoder.hidden

        def spied(*given: Any) -> torch.Tensor:
            threads.add((threading.current_thread().name, torch.get_num_threads()))
            return hidden(*given)

        monkeypatch.setattr(trainer._decoder, "hidden", spied)
        backend.train(local.roll(backend))
    assert threads == {("pack_0", 1), ("pack_1", 1)}
    assert trainer._limits.packs_at_a_time == 2
