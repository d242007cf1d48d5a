from __future__ import annotations

import pytest
import torch

from retrain_local import loss
from retrain_local.loss import importance_sampling_loss, selected_logprobs


def test_documented_vector() -> None:
    new = torch.tensor([-0.6, -0.9, -1.0, -0.1], requires_grad=True)
    old, advantages = torch.tensor([-1.0, -0.5, -2.0, -0.1]), torch.tensor([1.0, -1.0, -1.0, 2.0])
    value = importance_sampling_loss(new, old, advantages, 4)
    assert value.item() == pytest.approx(-0.025806, abs=1e-6)
    value.backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad * 4, torch.tensor([-1.491825, 0.670320, 2.718282, -2.0]), atol=1e-5, rtol=0)


def test_tokens_without_credit_stay_in_the_denominator() -> None:
    new = torch.tensor([0.4, -0.4, 1.0, 0.0])
    value = importance_sampling_loss(new, torch.zeros(4), torch.tensor([1.0, 0.0, -1.0, 2.0]), 4)
    assert value.item() == pytest.approx(-0.193386, abs=1e-6)


def test_log_ratio_is_clamped() -> None:
    value = importance_sampling_loss(torch.tensor([0.0]), torch.tensor([-500.0]), torch.tensor([-1.0]), 1)
    assert value.item() == pytest.approx(torch.tensor(20.0).exp().item())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
@pytest.mark.parametrize("chunk", [loss.CHUNK_ELEMENTS, 100])
def test_value_and_gradient_equal_autograds(temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, 40, (11,), generator=generator)
    weights = torch.randn(11, generator=generator)
    ours = torch.randn(11, 40, generator=generator, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    mine = selected_logprobs(ours, tokens, temperature)
    reference = torch.log_softmax(theirs / temperature, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(mine, reference, atol=1e-6, rtol=1e-6)
    (mine * weights).sum().backward()
    (reference * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_bf16_logits_are_read_in_fp32_and_get_a_bf16_gradient() -> None:
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16().requires_grad_()
    value = selected_logprobs(logits, torch.tensor([1, 2, 3]), 1.0)
    assert value.dtype == torch.float32
    value.sum().backward()
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
