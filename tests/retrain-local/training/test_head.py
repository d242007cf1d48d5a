from __future__ import annotations

import sys
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from retrain_local.devices import kernel_trials
from retrain_local.training import head
from retrain_local.training.head import plain_softmax, selected_logprobs, softmax_faults, softmax_of

VOCABULARY = 40


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("chunk", [2**20, 100, 1])
def test_value_and_gradient_equal_autograds(temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.LOGIT_CHUNK, "cpu", chunk)
    drawn = torch.Generator().manual_seed(0)
    linear = nn.Linear(12, VOCABULARY).requires_grad_(False)
    tokens, weights = torch.randint(0, VOCABULARY, (11,), generator=drawn), torch.randn(11, generator=drawn)
    ours = torch.randn(11, 12, generator=drawn, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()

    def capped(hidden: Tensor) -> Tensor:  # what stands behind a head is not always linear
        return 3.0 * torch.tanh(linear(hidden) / 3.0)

    mine = selected_logprobs(ours, tokens, capped, VOCABULARY, temperature)
    reference = torch.log_softmax(capped(theirs) / temperature, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(mine, reference, atol=1e-6, rtol=1e-6)
    (mine * weights).sum().backward()
    (reference * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_the_head_never_sees_more_rows_than_a_chunk_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.LOGIT_CHUNK, "cpu", 4 * VOCABULARY)
    monkeypatch.setattr(head, "FUSED_CHUNK", 7 * VOCABULARY)
    linear, seen = nn.Linear(3, VOCABULARY), []

    def watched(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return linear(hidden)  # type: ignore[no-any-return]

    hidden = torch.zeros(10, 3, requires_grad=True)
    selected_logprobs(hidden, torch.zeros(10, dtype=torch.int64), watched, VOCABULARY, 1.0).sum().backward()
    assert seen == [4, 4, 2]
    seen.clear()
    fused = partial(plain_softmax)  # another function: what a fused kernel leaves in memory is less
    selected_logprobs(hidden, torch.zeros(10, dtype=torch.int64), watched, VOCABULARY, 1.0, fused).sum().backward()
    assert seen == [7, 3]


def test_bf16_logits_are_read_in_fp32_and_give_a_bf16_gradient() -> None:
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    value = selected_logprobs(hidden, torch.tensor([1, 2, 3]), lambda x: x, 8, 1.0)
    assert value.dtype == torch.float32
    value.sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.dtype == torch.bfloat16


def test_a_logit_that_is_not_a_number_shows() -> None:
    hidden = torch.tensor([[0.0, 1.0], [0.0, float("nan")]])
    value = selected_logprobs(hidden, torch.tensor([0, 0]), lambda x: x, 2, 1.0)
    assert torch.isfinite(value).tolist() == [True, False]


def test_no_action_at_all() -> None:
    assert selected_logprobs(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64), lambda x: x, 8, 1.0).shape == (0,)


def test_a_cpu_has_pytorchs_operations() -> None:
    assert softmax_of(torch.device("cpu"), torch.bfloat16, 8) is plain_softmax


@pytest.mark.parametrize("spoilt", ["value", "slope", "slope of the others"])
def test_a_kernel_that_computes_something_else_is_found_out(spoilt: str) -> None:
    def wrong(logits: Tensor, tokens: Tensor, temperature: float, slope: bool) -> tuple[Tensor, Tensor]:
        logprobs, slopes = plain_softmax(logits, tokens, temperature, slope)
        if spoilt == "value":
            return logprobs + 0.1, slopes
        column = len(logits[0]) - 2 if spoilt == "slope" else 0
        slopes[1, column] += 0.02
        return logprobs, slopes

    given = {"device": torch.device("cpu"), "dtype": torch.float32, "vocabulary": 50}
    assert {fault.partition(" off by")[0] for fault in softmax_faults(wrong, **given)} == {spoilt}
    assert list(softmax_faults(plain_softmax, **given)) == []


def test_a_kernel_that_cannot_be_compiled_leaves_pytorchs_operations(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernel_trials, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "retrain_local.training.head_triton", None)
    assert softmax_of(torch.device("cuda", 0), torch.bfloat16, 8) is plain_softmax
    assert "fused softmax" in caplog.text
