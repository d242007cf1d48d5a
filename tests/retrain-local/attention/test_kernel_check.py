from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from retrain_local.attention.packed import PaddedAttend
from retrain_local.attention.pages import PagedKernels, Pages
from retrain_local.attention.select_kernels import packed_faults, paged_faults
from retrain_local.decoder import Scores
from retrain_local.devices.kernel_trials import first_fault
from tests.kit.shapes import shape
from tests.kit.shared import first_or_long

CPU = torch.device("cpu")
SHAPE = shape(4, 2, 16, 24)


class WrongPages(PagedKernels):
    """Right but for one thing."""

    def __init__(self, *, shift: int = 0, window: int = 0, value_scale: float = 1.0) -> None:
        self.shift, self.window, self.value_scale = shift, window, value_scale

    def read(self, q: Tensor, pages: Pages, tables: Tensor, lengths: Tensor, scores: Scores) -> Tensor:
        window = scores.window + self.window if scores.window else None
        seen = (lengths - self.shift).clamp(min=0)
        wrong = Scores(scale=scores.scale, window=window)
        return super().read(q, replace(pages, values=pages.values * self.value_scale), tables, seen, wrong)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn])
def test_right_pages_are_found_right(stored: torch.dtype) -> None:
    assert first_fault(paged_faults(PagedKernels(), SHAPE, CPU, torch.float32, stored)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [{"shift": 1}, {"window": 1}, {"value_scale": 1.1}, {"value_scale": torch.nan}])
def test_wrong_pages_are_found_out(dtype: torch.dtype, wrong: dict[str, Any]) -> None:
    assert "output off by" in str(first_fault(paged_faults(WrongPages(**wrong), SHAPE, CPU, dtype, dtype)))


def test_pages_that_are_not_written_are_found_out() -> None:
    class Forgetful(PagedKernels):
        def write(self, *given: Any) -> None:
            """Nothing."""

    assert "stored keys off by" in str(first_fault(paged_faults(Forgetful(), SHAPE, CPU, torch.float32, torch.float32)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_attention_is_found_right(dtype: torch.dtype) -> None:
    assert first_fault(packed_faults(PaddedAttend, SHAPE, CPU, dtype)) is None


class Exact(PaddedAttend):
    """Rounds nothing but its result."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        return super().__call__(layer, q.double(), k.double(), v.double(), scores).to(q.dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), first_or_long([(32, 8, 128), (14, 2, 64), (4, 4, 96), (8, 1, 256)])
)
@pytest.mark.parametrize("dtype", first_or_long([torch.float16, torch.bfloat16]))
def test_less_rounding_is_no_fault(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    shape = replace(SHAPE, heads=heads, kv_heads=kv_heads, head_size=size, value_size=size)
    assert first_fault(packed_faults(Exact, shape, CPU, dtype)) is None


class Spoilt(PaddedAttend):
    """Everything but one thing is right."""

    spoilt = ""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        if self.spoilt == "output":
            scores = Scores(scale=scores.scale * 1.2, window=scores.window)
        if self.spoilt == "dk":
            k = k.detach() + 0.5 * (k - k.detach())
        if self.spoilt == "raises":
            raise AssertionError("no\nkernel")
        return super().__call__(layer, q, k, v, scores)


@pytest.mark.parametrize(
    ("what", "said"), [("output", "output off"), ("dk", "dk off"), ("raises", "AssertionError: no")]
)
def test_wrong_attention_is_found_out(monkeypatch: pytest.MonkeyPatch, what: str, said: str) -> None:
    monkeypatch.setattr(Spoilt, "spoilt", what)
    assert str(first_fault(packed_faults(Spoilt, SHAPE, CPU, torch.float32))).startswith(said)


def test_running_out_of_memory_is_not_a_fault_of_the_kernel() -> None:
    def make(*_: Any) -> Any:
        raise torch.OutOfMemoryError

    with pytest.raises(torch.OutOfMemoryError):
        first_fault(packed_faults(make, SHAPE, CPU, torch.float32))
