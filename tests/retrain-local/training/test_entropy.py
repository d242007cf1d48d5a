from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from retrain_local.training import head as entropy
from retrain_local.training.head import logprobs_and_entropies, selected_logprobs

VOCABULARY = 40


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("chunk", [2**20, 100])
def test_values_and_gradients_equal_autograds(temperature: float, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(entropy.LOGIT_CHUNK, "cpu", chunk)
    drawn = torch.Generator().manual_seed(0)
    linear = nn.Linear(12, VOCABULARY).requires_grad_(False)
    tokens, weights = torch.randint(0, VOCABULARY, (11,), generator=drawn), torch.randn(2, 11, generator=drawn)
    ours = torch.randn(11, 12, generator=drawn, requires_grad=True)
    theirs = ours.detach().clone().requires_grad_()
    banned = torch.zeros(VOCABULARY).index_fill(0, torch.arange(3), -torch.inf)

    def capped(hidden: Tensor) -> Tensor:
        return 3.0 * torch.tanh(linear(hidden) / 3.0)

    tokens = tokens.clamp(min=3)
    mine = logprobs_and_entropies(ours, tokens, lambda h: capped(h) + banned, VOCABULARY, temperature)
    logp = torch.log_softmax(capped(theirs)[:, 3:] / temperature, -1)
    reference = logp.gather(1, tokens[:, None] - 3)[:, 0], -(logp.exp() * logp).sum(-1)
    for found, expected in zip(mine, reference, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)
    sum((values * weights[at]).sum() for at, values in enumerate(mine)).backward()  # type: ignore[union-attr]
    sum((values * weights[at]).sum() for at, values in enumerate(reference)).backward()  # type: ignore[union-attr]
    torch.testing.assert_close(ours.grad, theirs.grad, atol=1e-6, rtol=1e-5)


def test_the_log_probabilities_are_those_of_the_plain_head_bit_for_bit() -> None:
    hidden, tokens = torch.randn(9, 8, generator=torch.Generator().manual_seed(0)), torch.arange(9) % 8
    found, _ = logprobs_and_entropies(hidden.bfloat16(), tokens, lambda h: h, 8, 0.7)
    assert torch.equal(found, selected_logprobs(hidden.bfloat16(), tokens, lambda h: h, 8, 0.7))
    assert [len(values) for values in logprobs_and_entropies(hidden[:0], tokens[:0], lambda h: h, 8, 0.7)] == [0, 0]


def test_the_head_never_sees_more_rows_than_a_chunk_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(entropy.LOGIT_CHUNK, "cpu", 4 * VOCABULARY)
    linear, seen = nn.Linear(3, VOCABULARY), []

    def watched(hidden: Tensor) -> Tensor:
        seen.append(len(hidden))
        return linear(hidden)  # type: ignore[no-any-return]

    hidden = torch.zeros(10, 3, requires_grad=True)
    logprobs_and_entropies(hidden, torch.zeros(10, dtype=torch.int64), watched, VOCABULARY, 1.0)[1].sum().backward()
    assert seen == [4, 4, 2]
