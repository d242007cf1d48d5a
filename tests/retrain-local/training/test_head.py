from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from retrain_local.training import head
from retrain_local.training.head import selected_logprobs

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
    linear, seen = nn.Linear(3, VOCABULARY), []

    def watched(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return linear(hidden)  # type: ignore[no-any-return]

    hidden = torch.zeros(10, 3, requires_grad=True)
    selected_logprobs(hidden, torch.zeros(10, dtype=torch.int64), watched, VOCABULARY, 1.0).sum().backward()
    assert seen == [4, 4, 2]


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
