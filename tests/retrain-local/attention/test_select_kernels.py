from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from retrain.api import ConfigError
from retrain_local.attention import select_kernels, varlen
from retrain_local.attention.packed import PaddedAttend
from retrain_local.attention.pages import PagedKernels, Pages, key_stretches
from retrain_local.attention.select_kernels import Kernels, kernels_for, packed_faults, paged_faults
from retrain_local.decoder import Scores
from retrain_local.devices.kernel_trials import first_fault
from tests.kit.problems import codes_in
from tests.kit.shapes import shape
from tests.kit.shared import first_or_long

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = shape(4, 2, 64)


def chosen(name: str = "default", pool: str = "auto", **given: Any) -> Kernels:
    of = {"device": GPU, "dtype": torch.bfloat16, "of": SHAPE, "exact": True} | given
    table = SimpleNamespace(attention_kernel=name, kv_cache_dtype=pool)
    keys = {"inference.attention_kernel": name}
    config: Any = SimpleNamespace(value=keys.get, inference=table, place=lambda key: f"run.toml [{key}]")
    return kernels_for(config, of["device"], of["dtype"], of["of"], exact=of["exact"])


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU of compute capability 9.0 and triton, both made believe, and kernels that prove right."""
    facts: dict[str, Any] = {"capability": (9, 0), "packed": None, "paged": None, "installed": {"triton"}}

    class TritonPages(PagedKernels):
        def __init__(self, multiprocessors: int) -> None:
            self.multiprocessors = multiprocessors

    module = ModuleType("retrain_local.attention.paged_triton")
    module.TritonPages = TritonPages  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(select_kernels, "find_spec", lambda name: name if name in facts["installed"] else None)
    monkeypatch.setattr(select_kernels, "packed_faults", lambda *_: iter(filter(None, [facts["packed"]])))
    monkeypatch.setattr(
        select_kernels,
        "paged_faults",
        lambda *given: facts.update(stored=given[-1]) or iter(filter(None, [facts["paged"]])),
    )
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: facts["capability"])
    properties = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return facts


def is_flash(make: Callable[..., Any]) -> bool:
    return isinstance(make, partial) and make.func is varlen.VarlenAttend


def test_a_cpu_has_plain_pytorch_and_refuses_kernels_that_need_cuda() -> None:
    kernels = chosen(device=CPU, dtype=torch.float32)
    assert (kernels.packed, kernels.paged) == (PaddedAttend, None)
    for name in ("flash", "triton", "cutlass"):
        with pytest.raises(ConfigError, match="CUDA") as caught:
            chosen(name, device=CPU, dtype=torch.float32)
        assert codes_in(caught) == ["engine.kernel-unavailable"]
        assert caught.value.problems[0].where == "run.toml [inference.attention_kernel]"


@pytest.mark.parametrize("name", ["default", "flash", "triton"])
@pytest.mark.parametrize("exact", [True, False])
def test_available_kernels_are_taken_as_exact_as_requested(hopper: dict[str, Any], name: str, exact: bool) -> None:
    kernels = chosen(name, exact=exact)
    assert is_flash(kernels.packed)
    assert isinstance(kernels.paged, PagedKernels)
    assert getattr(kernels.paged, "multiprocessors", None) == 132
    assert isinstance(kernels.packed, partial)
    assert kernels.packed.keywords == {"exact": exact}
    assert kernels.is_ordered is exact


def test_what_proves_wrong_is_left_out_or_refused(hopper: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    hopper |= {"packed": "dk off by 3", "paged": "output off by 2"}
    with caplog.at_level(logging.WARNING, logger="retrain"):
        kernels = chosen()
    assert kernels == Kernels(packed=PaddedAttend, paged=None)
    assert "dk off by 3" in caplog.text
    assert "output off by 2" in caplog.text
    for name, fault in (("flash", "dk off by 3"), ("triton", "output off by 2")):
        with pytest.raises(ConfigError, match=fault):
            chosen(name)


@pytest.mark.parametrize(
    ("name", "change", "given", "reason"),
    [
        ("flash", {"capability": (7, 5)}, {}, "8.0"),
        ("flash", {}, {"dtype": torch.float32}, "16 bits"),
        ("triton", {"capability": (7, 5)}, {}, "8.0"),
        ("triton", {"installed": set()}, {}, "not installed"),
        ("triton", {"capability": (8, 6)}, {"pool": "fp8"}, "8.9"),
        ("triton", {}, {"of": shape(71, 1, 64)}, "71 query heads"),
        ("triton", {}, {"of": shape(4, 2, 320)}, "320"),
        ("tk", {}, {}, "ThunderKittens"),
        ("cutlass", {"capability": (8, 9)}, {}, "9.0"),
        ("cutlass", {}, {}, "flash_attn.cute.interface"),
    ],
)
def test_refusals_name_the_reason(
    hopper: dict[str, Any], caplog: pytest.LogCaptureFixture, name: str, change: Any, given: Any, reason: str
) -> None:
    hopper |= change
    with pytest.raises(ConfigError, match=reason):
        chosen(name, **given)
    with caplog.at_level(logging.WARNING, logger="retrain"):
        chosen(**given)
    assert caplog.text == ""  # nothing of it is a fault


@pytest.mark.parametrize(
    ("pool", "stored"), [("auto", torch.bfloat16), ("int8", torch.int8), ("fp8", torch.float8_e4m3fn)]
)
def test_kernels_are_proven_on_the_pool_they_read(hopper: dict[str, Any], pool: str, stored: torch.dtype) -> None:
    chosen(pool=pool)
    assert hopper["stored"] is stored


@pytest.mark.parametrize("fault", [None, "dq off by 1"])
def test_cutlass_replaces_flash(hopper: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: str | None) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", calls.append)
    monkeypatch.setattr(torch.nn.attention, "restore_flash_attention_impl", lambda: calls.append(None))
    hopper["installed"] |= {select_kernels.FA4}
    hopper["packed"] = fault
    if fault:
        with pytest.raises(ConfigError, match=fault):
            chosen("cutlass")
    else:
        assert is_flash(chosen("cutlass").packed)
    assert calls == (["FA4", None] if fault else ["FA4"])
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", lambda name: import_module("no_such"))
    with pytest.raises(ConfigError, match="no_such"):
        chosen("cutlass")


NARROW = shape(4, 2, 16, 24)


class WrongPages(PagedKernels):
    """Right but for one thing."""

    def __init__(self, *, shift: int = 0, window: int = 0, value_scale: float = 1.0) -> None:
        self.shift, self.window, self.value_scale = shift, window, value_scale

    def read(
        self, q: Tensor, pages: Pages, tables: Tensor, lengths: Tensor, scores: Scores, prefixes: Any = None
    ) -> Tensor:
        window = scores.window + self.window if scores.window else None
        seen = (lengths - self.shift).clamp(min=0)
        wrong = Scores(scale=scores.scale, window=window)
        return super().read(q, replace(pages, values=pages.values * self.value_scale), tables, seen, wrong, prefixes)


def test_right_kernels_are_found_right() -> None:
    for stored in (torch.float32, torch.bfloat16, torch.int8, torch.float8_e4m3fn):
        assert first_fault(paged_faults(PagedKernels(), NARROW, CPU, torch.float32, stored)) is None
    for dtype in (torch.float32, torch.bfloat16):
        assert first_fault(packed_faults(PaddedAttend, NARROW, CPU, dtype)) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("wrong", [{"shift": 1}, {"window": 1}, {"value_scale": 1.1}, {"value_scale": torch.nan}])
def test_wrong_pages_are_found_out(dtype: torch.dtype, wrong: dict[str, Any]) -> None:
    assert "output off by" in str(first_fault(paged_faults(WrongPages(**wrong), NARROW, CPU, dtype, dtype)))


def test_pages_that_are_not_written_are_found_out() -> None:
    class Forgetful(PagedKernels):
        def write(self, *given: Any) -> None:
            """Nothing."""

    assert "stored keys off by" in str(
        first_fault(paged_faults(Forgetful(), NARROW, CPU, torch.float32, torch.float32))
    )


class Exact(PaddedAttend):
    """Rounds nothing but its result."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        return super().__call__(layer, q.double(), k.double(), v.double(), scores).to(q.dtype)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "size"), first_or_long([(32, 8, 128), (14, 2, 64), (4, 4, 96), (8, 1, 256)])
)
@pytest.mark.parametrize("dtype", first_or_long([torch.float16, torch.bfloat16]))
def test_less_rounding_is_no_fault(heads: int, kv_heads: int, size: int, dtype: torch.dtype) -> None:
    shape = replace(NARROW, heads=heads, kv_heads=kv_heads, head_size=size, value_size=size)
    assert first_fault(packed_faults(Exact, shape, CPU, dtype)) is None


class Spoilt(PaddedAttend):
    """Everything but one thing is right."""

    spoilt = ""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scores: Scores) -> Tensor:
        if self.spoilt == "output":
            scores = Scores(scale=scores.scale * 1.2, window=scores.window)
        if self.spoilt == "dk":
            k = k.detach() + 0.5 * (k - k.detach())
        if self.spoilt in ("raises", "memory"):
            raise AssertionError("no\nkernel") if self.spoilt == "raises" else torch.OutOfMemoryError
        return super().__call__(layer, q, k, v, scores)


@pytest.mark.parametrize(
    ("what", "said"), [("output", "output off"), ("dk", "dk off"), ("raises", "AssertionError: no"), ("memory", "")]
)
def test_wrong_attention_is_found_out(monkeypatch: pytest.MonkeyPatch, what: str, said: str) -> None:
    monkeypatch.setattr(Spoilt, "spoilt", what)
    if what == "memory":  # not a fault of the kernel
        with pytest.raises(torch.OutOfMemoryError):
            first_fault(packed_faults(Spoilt, NARROW, CPU, torch.float32))
    else:
        assert str(first_fault(packed_faults(Spoilt, NARROW, CPU, torch.float32))).startswith(said)


H100 = 8 * 132  # programs


@given(programs=st.integers(1, 4096), heads=st.integers(1, 8192), max_keys=st.integers(0, 2**17))
def test_stretches_are_powers_of_two_near_what_fills_the_device(programs: int, heads: int, max_keys: int) -> None:
    found = key_stretches(programs, heads, max_keys)
    assert found & (found - 1) == 0
    assert 1 <= found <= 32
    assert found == 1 or (found * 64 < max_keys and found * heads <= programs * 2**0.5)
    # 128 rows of 8 key heads miss the full device by 32 of 1,056 programs, which pays for no second launch
    assert [key_stretches(H100, rows * 8, 40_960) for rows in (1, 16, 64, 96, 128)] == [32, 8, 2, 1, 1]
