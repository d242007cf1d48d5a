"""The fused softmax, on a GPU if there is one, otherwise in Triton's interpreter, which needs a process of its own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from retrain_local.training.head import plain_softmax, selected_logprobs, softmax_faults
from tests.kit.triton_interpreter import DEVICE, DTYPES, in_the_interpreter, kernels_run, run_interpreted


@in_the_interpreter
@pytest.mark.long  # it takes its time; `nox -s proofs` installs triton
def test_the_kernel_in_the_interpreter() -> None:
    run_interpreted(Path(__file__))


@kernels_run
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocabulary", [7, 512, 9000, 12_288])
def test_it_computes_what_pytorch_does(vocabulary: int, dtype: torch.dtype) -> None:
    from retrain_local.training.head_triton import triton_softmax

    assert list(softmax_faults(triton_softmax, device=DEVICE, dtype=dtype, vocabulary=vocabulary)) == []


@kernels_run
@pytest.mark.parametrize("temperature", [0.7, 1.0])
def test_the_gradient_of_the_hidden_states_is_autograds(temperature: float) -> None:
    from retrain_local.training.head_triton import triton_softmax

    torch.manual_seed(0)
    linear = nn.Linear(12, 40, device=DEVICE).requires_grad_(False)
    ours = torch.randn(11, 12, device=DEVICE, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    tokens, weights = torch.randint(0, 40, (11,), device=DEVICE), torch.randn(11, device=DEVICE)
    mine = selected_logprobs(ours, tokens, linear, 40, temperature, triton_softmax)
    reference = torch.log_softmax(linear(theirs) / temperature, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(mine, reference, atol=1e-5, rtol=1e-5)
    (mine * weights).sum().backward()
    (reference * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-5, rtol=1e-4)


@kernels_run
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_not_finite_shows_in_its_row_alone(broken: float) -> None:
    from retrain_local.training.head_triton import triton_softmax

    logits = torch.randn(3, 5000, device=DEVICE)
    logits[1, 4999] = broken
    logprobs, slope = triton_softmax(logits, torch.zeros(3, dtype=torch.int64, device=DEVICE), 1.0, True)
    assert torch.isfinite(logprobs).tolist() == [True, False, True]
    assert slope[[0, 2]].isfinite().all()
    assert not slope[1].isfinite().all()


@kernels_run
def test_logits_may_be_a_view() -> None:
    from retrain_local.training.head_triton import triton_softmax

    tokens = torch.tensor([3, 1], device=DEVICE)
    for logits in (torch.randn(2, 96, device=DEVICE)[:, :64], torch.randn(64, 2, device=DEVICE).T):
        for got, wanted in zip(
            triton_softmax(logits, tokens, 0.9, True), plain_softmax(logits, tokens, 0.9, True), strict=True
        ):
            torch.testing.assert_close(got, wanted)
