from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from retrain_local.sampling import draw
from retrain_local.sampling.draw import draw_tokens

LOGITS = arrays(np.float32, (3, 7), elements=st.floats(-30, 30, width=32))
UNIFORMS = arrays(np.float64, 3, elements=st.floats(0, 1, exclude_max=True))


@given(LOGITS, UNIFORMS, st.floats(0.1, 3.0))
@settings(max_examples=50, deadline=None)
def test_the_draw_inverts_the_distribution_function(logits: np.ndarray, u: np.ndarray, temperature: float) -> None:
    drawn = draw_tokens(torch.from_numpy(logits), temperature, torch.from_numpy(u), entropy=True)
    logprobs = torch.log_softmax(torch.from_numpy(logits).double() / temperature, -1).numpy()
    cumulative = np.exp(logprobs).cumsum(-1)
    for row, token in enumerate(drawn.tokens_B.tolist()):
        below = cumulative[row, token - 1] if token else 0.0
        assert below - 1e-5 <= u[row] <= cumulative[row, token] + 1e-5
        assert drawn.logprobs_B[row].item() == pytest.approx(logprobs[row, token], abs=1e-4)
        entropy = -(np.exp(logprobs[row]) * logprobs[row]).sum()
        assert drawn.entropies_B[row].item() == pytest.approx(entropy, abs=1e-4)


@pytest.mark.parametrize("u", [0.0, 0.5, np.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("possible", range(4))
def test_a_token_of_probability_zero_is_never_drawn(u: float, possible: int) -> None:
    logits = torch.full((1, 4), -torch.inf)
    logits[0, possible] = 3.0
    drawn = draw_tokens(logits, 1.0, torch.tensor([u], dtype=torch.float64), entropy=True)
    assert drawn.tokens_B.item() == possible
    assert drawn.logprobs_B.item() == 0.0
    assert drawn.entropies_B.item() == 0.0


@given(LOGITS, UNIFORMS, st.floats(0.1, 3.0))
@settings(max_examples=50, deadline=None)
def test_greedy_takes_the_likeliest_token(logits: np.ndarray, u: np.ndarray, temperature: float) -> None:
    given_BV, u_B = torch.from_numpy(logits), torch.from_numpy(u)
    drawn = draw_tokens(given_BV, temperature, u_B, entropy=True, greedy=True)
    assert drawn.tokens_B.tolist() == given_BV.argmax(-1).tolist()
    logprobs_BV = torch.log_softmax(given_BV / temperature, -1)
    torch.testing.assert_close(drawn.logprobs_B, logprobs_BV.max(-1).values, atol=1e-5, rtol=0)
    assert torch.equal(drawn.entropies_B, draw_tokens(given_BV, temperature, u_B, entropy=True).entropies_B)


def test_documented_vector() -> None:
    logits, u = torch.tensor([[2.0, 1.0, 0.0, -1.0]]), torch.zeros(1, dtype=torch.float64)
    for temperature, logprob, entropy in ((1.0, -0.440190, 0.947537), (0.7, -0.270674, 0.702028)):
        drawn = draw_tokens(logits, temperature, u, entropy=True)
        assert drawn.logprobs_B.item() == pytest.approx(logprob, abs=1e-6)
        assert drawn.entropies_B.item() == pytest.approx(entropy, abs=1e-6)


def test_chunks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, 50, generator=generator)
    u = torch.rand(10, generator=generator, dtype=torch.float64)
    whole = draw_tokens(logits, 0.9, u, entropy=True)
    monkeypatch.setattr(draw, "DRAW_CHUNK", 100)
    parts = draw_tokens(logits, 0.9, u, entropy=True)
    assert torch.equal(whole.tokens_B, parts.tokens_B)
    assert torch.equal(whole.logprobs_B, parts.logprobs_B)
    assert torch.equal(whole.entropies_B, parts.entropies_B)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_bad_logit_shows_in_the_logprob(bad: float) -> None:
    logits = torch.zeros(2, 5)
    logits[1, 4] = bad
    drawn = draw_tokens(logits, 1.0, torch.tensor([0.1, 0.1], dtype=torch.float64), entropy=False)
    assert torch.isfinite(drawn.logprobs_B).tolist() == [True, False]
