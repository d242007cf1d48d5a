from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from retrain.api import ConfigError
from retrain_local.attention import select_kernels, varlen
from retrain_local.attention.packed import PaddedAttend
from retrain_local.attention.pages import PagedKernels
from retrain_local.attention.select_kernels import Kernels, kernels_for
from retrain_local.decoder import Shape
from tests.kit.problems import codes_in
from tests.kit.shapes import shape

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = shape(4, 2, 64)


def chosen(
    name: str = "default",
    *,
    device: torch.device = GPU,
    dtype: torch.dtype = torch.bfloat16,
    pool: str = "auto",
    of: Shape = SHAPE,
    exact: bool = True,
) -> Kernels:
    keys = {"inference.attention_kernel": name}
    table = SimpleNamespace(attention_kernel=name, kv_cache_dtype=pool)
    config: Any = SimpleNamespace(value=keys.get, inference=table, place=lambda key: f"run.toml [{key}]")
    return kernels_for(config, device, dtype, of, exact=exact)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A machine with a GPU of compute capability 9.0 and triton, both made believe, and kernels that prove right."""
    facts: dict[str, Any] = {"capability": (9, 0), "packed": None, "paged": None, "installed": {"triton"}}

    class TritonPages(PagedKernels):
        def __init__(self, multiprocessors: int) -> None:
            assert multiprocessors == 132

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


def test_a_cpu_has_plain_pytorch() -> None:
    kernels = chosen(device=CPU, dtype=torch.float32)
    assert kernels.packed is PaddedAttend
    assert kernels.paged is None


@pytest.mark.parametrize("name", ["flash", "triton", "cutlass"])
def test_a_cpu_refuses_kernels_that_need_cuda(name: str) -> None:
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
    assert isinstance(kernels.packed, partial)
    assert kernels.packed.keywords == {"exact": exact}
    assert kernels.is_ordered is exact


def test_default_goes_without_what_proves_wrong_and_says_so(
    hopper: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    hopper |= {"packed": "dk off by 3", "paged": "output off by 2"}
    with caplog.at_level(logging.WARNING, logger="retrain"):
        kernels = chosen()
    assert kernels == Kernels(packed=PaddedAttend, paged=None)
    assert "dk off by 3" in caplog.text
    assert "output off by 2" in caplog.text


@pytest.mark.parametrize(("name", "fault"), [("flash", "packed"), ("triton", "paged")])
def test_what_is_asked_for_and_proves_wrong_is_refused(hopper: dict[str, Any], name: str, fault: str) -> None:
    hopper[fault] = "output off by 2"
    with pytest.raises(ConfigError, match="output off by 2"):
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
    hopper: dict[str, Any],
    caplog: pytest.LogCaptureFixture,
    name: str,
    change: dict[str, Any],
    given: dict[str, Any],
    reason: str,
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
def test_kernels_are_proven_on_the_pool_that_they_will_read(
    hopper: dict[str, Any], pool: str, stored: torch.dtype
) -> None:
    chosen(pool=pool)
    assert hopper["stored"] is stored


@pytest.mark.parametrize("fault", [None, "dq off by 1"])
def test_cutlass_takes_the_place_of_flash_attention(
    hopper: dict[str, Any], monkeypatch: pytest.MonkeyPatch, fault: str | None
) -> None:
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


def test_a_package_that_does_not_register_is_refused(hopper: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def activate(name: str) -> None:
        raise ImportError("no module named cutlass")

    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activate)
    hopper["installed"] |= {select_kernels.FA4}
    with pytest.raises(ConfigError, match="no module named cutlass"):
        chosen("cutlass")
