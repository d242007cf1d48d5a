from __future__ import annotations

import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from retrain_local.devices import kernel_trials
from retrain_local.training import head
from retrain_local.training.head import (
    logprobs_and_entropies,
    plain_softmax,
    selected_logprobs,
    softmax_faults,
    softmax_of,
)

VOCABULARY = 40


def both(hidden: Tensor, tokens: Tensor, head_: Any, temperature: float = 1.0, **more: Any) -> tuple[Tensor, ...]:
    return logprobs_and_entropies(hidden, tokens, head_, VOCABULARY, temperature, **more)


def selected(hidden: Tensor, tokens: Tensor, head_: Any, temperature: float = 1.0, **more: Any) -> tuple[Tensor, ...]:
    return (selected_logprobs(hidden, tokens, head_, VOCABULARY, temperature, **more),)


@pytest.mark.parametrize("of", [selected, both])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("chunk", [2**20, 100, 1])
def test_values_and_gradients(of: Any, temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A head is not always linear, and bans tokens by -inf."""
    monkeypatch.setitem(head.LOGIT_CHUNK, "cpu", chunk)
    drawn = torch.Generator().manual_seed(0)
    linear = nn.Linear(12, VOCABULARY).requires_grad_(False)
    tokens, weights = torch.randint(3, VOCABULARY, (11,), generator=drawn), torch.randn(2, 11, generator=drawn)
    ours = torch.randn(11, 12, generator=drawn, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    banned = torch.zeros(VOCABULARY).index_fill(0, torch.arange(3), -torch.inf)

    def capped(hidden: Tensor) -> Tensor:
        return 3.0 * torch.tanh(linear(hidden) / 3.0)

    mine = of(ours, tokens, lambda hidden: capped(hidden) + banned, temperature)
    logp = torch.log_softmax(capped(theirs)[:, 3:] / temperature, -1)
    reference = (logp.gather(1, tokens[:, None] - 3)[:, 0], -(logp.exp() * logp).sum(-1))[: len(mine)]
    for found, expected in zip(mine, reference, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    torch.stack([(values * weights[at]).sum() for at, values in enumerate(mine)]).sum().backward()
    torch.stack([(values * weights[at]).sum() for at, values in enumerate(reference)]).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_both_have_the_log_probabilities_of_the_plain_head_bit_for_bit() -> None:
    hidden, tokens = torch.randn(9, 8, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 8
    found, _ = logprobs_and_entropies(hidden.bfloat16(), tokens, lambda h: h, 8, 0.7)
    assert torch.equal(found, selected_logprobs(hidden.bfloat16(), tokens, lambda h: h, 8, 0.7))
    for of in (selected, both):
        assert all(len(values) == 0 for values in of(hidden[:0], tokens[:0], lambda h: h))


# a fused softmax is another function: it leaves less in memory
@pytest.mark.parametrize(
    ("of", "more", "chunks"),
    [(selected, {}, [4, 4, 2]), (both, {}, [4, 4, 2]), (selected, {"softmax": partial(plain_softmax)}, [7, 3])],
)
def test_chunks_bound_rows(of: Any, more: dict[str, Any], chunks: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(head.LOGIT_CHUNK, "cpu", 4 * VOCABULARY)
    monkeypatch.setattr(head, "FUSED_CHUNK", 7 * VOCABULARY)
    linear, seen = nn.Linear(3, VOCABULARY), []

    def watched(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return linear(hidden)  # type: ignore[no-any-return]

    hidden = torch.zeros(10, 3, requires_grad=True)
    of(hidden, torch.zeros(10, dtype=torch.int64), watched, **more)[-1].sum().backward()
    assert seen == chunks


def test_bf16_logits_are_read_in_fp32_and_one_that_is_not_a_number_shows() -> None:
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    value = selected_logprobs(hidden, torch.tensor([1, 2, 3]), lambda x: x, 8, 1.0)
    value.sum().backward()
    assert (value.dtype, hidden.grad.dtype) == (torch.float32, torch.bfloat16)
    hidden = torch.tensor([[0.0, 1.0], [0.0, float("nan")]])
    value = selected_logprobs(hidden, torch.tensor([0, 0]), lambda x: x, 2, 1.0)
    assert torch.isfinite(value).tolist() == [True, False]


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


def test_without_a_compiler_pytorch_is_used(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert softmax_of(torch.device("cpu"), torch.bfloat16, 8) is plain_softmax
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    monkeypatch.setattr(kernel_trials, "find_spec", lambda _: object())
    monkeypatch.setitem(sys.modules, "retrain_local.training.head_triton", None)
    assert softmax_of(torch.device("cuda", 0), torch.bfloat16, 8) is plain_softmax
    assert "fused softmax" in caplog.text
