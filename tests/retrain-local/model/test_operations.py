"""Norm, heads and gate against the same in the fewest words, values and gradients."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from retrain_local.devices import kernel_trials
from retrain_local.model import fused, operations
from retrain_local.model.fused import faults, fused_operations
from retrain_local.model.operations import Operations, Turn, rms_norm, split_heads, swiglu
from tests.kit.shapes import shape

EPS = 1e-5


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def plain_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def plain_turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * torch.cat([cos, cos], -1) + torch.cat([-second, first], -1) * torch.cat([sin, sin], -1)


def agree(operation: Callable[[Tensor], Tensor], plain: Callable[[Tensor], Tensor], x: Tensor) -> None:
    """In value and gradient, with autograd and without it."""
    x.requires_grad_(True)
    found, expected = operation(x), plain(x)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        torch.testing.assert_close(operation(x), expected, rtol=1e-5, atol=1e-6)
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(5))
    gradients = [torch.autograd.grad((y * weights).sum(), x)[0] for y in (found, expected)]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 8), (5, 32), (4, 3, 16), (0, 8)])
def test_norm(shape: tuple[int, ...]) -> None:
    weight = drawn(*shape[1:])  # of every head its own where there are heads
    agree(lambda x: rms_norm(x, weight, EPS), lambda x: plain_norm(x, weight, EPS), drawn(*shape))
    agree(lambda x: rms_norm(x, weight, EPS), lambda x: plain_norm(x, weight, EPS), torch.zeros(shape))


@pytest.mark.parametrize("norm", [rms_norm, operations._fused_norm])
def test_every_norm_rounds_where_transformers_does(norm: Callable[[Tensor, Tensor, float], Tensor]) -> None:
    """Before the product with the weight: on a CPU and on CUDA."""
    theirs = LlamaRMSNorm(256, EPS).bfloat16()
    x = drawn(50, 256).bfloat16() * 3
    with torch.no_grad():
        theirs.weight.copy_(1 + drawn(256) * 0.3)
        found, expected = norm(x, theirs.weight, EPS), theirs(x)
    # the mean of squares may be summed in another order, which moves a few numbers by a rounding
    assert (found != expected).float().mean() < 0.002


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (3, 1), (2, 2)])
def test_heads(heads: int, kv_heads: int, normalised: bool) -> None:
    angles_N1P = drawn(7, 1, 4)
    norm_HD = drawn(heads + kv_heads, 8) if normalised else None
    turn = Turn(
        heads=heads, kv_heads=kv_heads, cos_N1P=angles_N1P.cos(), sin_N1P=angles_N1P.sin(), norm_HD=norm_HD, eps=EPS
    )

    def plain(x: Tensor) -> Tensor:
        qk, values = x.split((heads + kv_heads, kv_heads), dim=1)
        qk = qk if norm_HD is None else plain_norm(qk, norm_HD, EPS)
        return torch.cat([plain_turn(qk, turn.cos_N1P, turn.sin_N1P), values], dim=1)

    shape = (7, heads + 2 * kv_heads, 8)
    agree(lambda x: torch.cat(split_heads(x, turn), dim=1), plain, drawn(*shape))
    strided = drawn(7, shape[1] * 8 + 3)[:, : shape[1] * 8].detach()  # a view into something wider
    agree(lambda x: torch.cat(split_heads(x.view(shape), turn), dim=1), lambda x: plain(x.view(shape)), strided)


@pytest.mark.parametrize("shape", [(1, 2), (9, 24)])
def test_gate(shape: tuple[int, ...]) -> None:
    def plain(x: Tensor) -> Tensor:
        return functional.silu(x[:, : shape[1] // 2]) * x[:, shape[1] // 2 :]

    agree(swiglu, plain, drawn(*shape) * 3)


@pytest.mark.parametrize("wide", [False, True])
def test_what_a_product_reads_is_not_kept_but_made_again_bit_by_bit(wide: bool) -> None:
    def gradients(spares: Callable[[Tensor], AbstractContextManager[None]]) -> tuple[Tensor, list[bool]]:
        x_ND = drawn(5, 8).to(torch.float32 if wide else torch.bfloat16).requires_grad_()
        weight, up, down = drawn(8).bfloat16(), drawn(12, 8).bfloat16(), drawn(4, 6).bfloat16()
        products = [up.requires_grad_(), down.requires_grad_()]
        normed_ND = rms_norm(x_ND, weight, EPS)
        with spares(normed_ND):
            gate_up = functional.linear(normed_ND, up)
        inner = swiglu(gate_up)
        with spares(inner):
            y_ND = functional.linear(inner, down)
        watched = [weakref.ref(normed_ND), weakref.ref(inner)]
        del normed_ND, inner
        are_kept = [each() is not None for each in watched]
        found = torch.autograd.grad(y_ND.float().square().sum(), (x_ND, *products))
        return torch.cat([g.float().flatten() for g in found]), are_kept

    (plain, are_kept), (again, are_spared) = gradients(lambda _: nullcontext()), gradients(operations.made_again)
    assert torch.equal(plain, again)
    assert all(are_kept)
    assert not any(are_spared)


CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
SHAPE = shape(4, 2, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pytorchs_own_have_no_faults(dtype: torch.dtype) -> None:
    assert list(faults(Operations(), CPU, dtype, SHAPE)) == []
    assert fused_operations(CPU, dtype, SHAPE) == Operations()


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


def with_kernels(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Operations]) -> Operations:
    """The operations of a GPU; `make` is called when the kernels are read from their module."""

    class Kernels(ModuleType):
        OPERATIONS = property(lambda _: make())

    monkeypatch.setitem(sys.modules, "retrain_local.model.operations_triton", Kernels("operations_triton"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernel_trials, "find_spec", lambda name: name)
    numbers = fused.numbers
    monkeypatch.setattr(fused, "numbers", lambda size, dtype, device: numbers(size, dtype, CPU))
    return fused_operations(GPU, torch.float32, SHAPE)


def fails() -> Operations:
    raise OSError("no C compiler\nin sight")


def own(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x, weight, eps)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Operations(rms_norm=own), ""),
        (fails, "OSError: no C compiler"),
        (lambda: Operations(swiglu=lambda x: x[:, :96]), "gate off by"),
    ],
)
def test_kernels_are_used_if_they_prove_right_and_otherwise_left_out_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, make: Callable[[], Operations], said: str
) -> None:
    with caplog.at_level(logging.WARNING, logger="retrain"):
        assert with_kernels(monkeypatch, make) == (Operations() if said else Operations(rms_norm=own))
    assert said in caplog.text
    assert bool(said) == bool(caplog.text)
