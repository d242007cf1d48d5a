from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from retrain_local.devices import kernel_trials
from retrain_local.model import fused
from retrain_local.model.fused import faults, fused_operations
from retrain_local.model.operations import Operations, rms_norm, swiglu
from tests.kit.shapes import shape

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = shape(4, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_own_have_no_faults(dtype: torch.dtype) -> None:
    assert list(faults(Operations(), CPU, dtype, SHAPE)) == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"rms_norm": lambda x, weight, eps: rms_norm(x, weight, 0.5)}, {"norm", "gradient"}),
        ({"swiglu": lambda x: x.chunk(2, dim=-1)[0]}, {"gate", "gradient"}),
        ({"split_heads": lambda x, turn: x.split((4, 2, 2), dim=1)}, {"queries", "keys", "gradient"}),
        ({"rms_norm": lambda x, weight, eps: x * torch.nan}, {"norm", "gradient"}),
        ({"swiglu": lambda x: swiglu(x.detach()) + 0 * x[:, :96]}, {"gradient"}),  # right, and wrong backwards
    ],
)
def test_faults_are_named(dtype: torch.dtype, wrong: dict[str, Any], said: set[str]) -> None:
    assert {fault.split()[0] for fault in faults(Operations(**wrong), CPU, dtype, SHAPE)} == said


def test_a_cpu_has_pytorchs_own() -> None:
    assert fused_operations(CPU, torch.float32, SHAPE) == Operations()


class Kernels(ModuleType):
    """The module of the kernels; `make` is called when they are read."""

    def __init__(self, make: Callable[[], Operations]) -> None:
        super().__init__("retrain_local.model.operations_triton")
        self._make = make

    @property
    def OPERATIONS(self) -> Operations:
        return self._make()


def with_kernels(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Operations]) -> Operations:
    monkeypatch.setitem(sys.modules, "retrain_local.model.operations_triton", Kernels(make))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernel_trials, "find_spec", lambda name: name)
    numbers = fused.numbers
    monkeypatch.setattr(fused, "numbers", lambda size, dtype, device: numbers(size, dtype, CPU))
    return fused_operations(GPU, torch.float32, SHAPE)


def test_kernels_that_prove_right_are_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def own(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return rms_norm(x, weight, eps)

    assert with_kernels(monkeypatch, lambda: Operations(rms_norm=own)).rms_norm is own
    assert caplog.text == ""


def fails() -> Operations:
    raise OSError("no C compiler\nin sight")


@pytest.mark.parametrize(
    ("make", "said"),
    [(fails, "OSError: no C compiler"), (lambda: Operations(swiglu=lambda x: x[:, :96]), "gate off by")],
)
def test_kernels_that_do_not_are_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Callable[[], Operations], said: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="retrain"):
        assert with_kernels(monkeypatch, make) == Operations()
    assert said in caplog.text
