"""The drawing kernels, on a GPU or, in a process of their own, in Triton's interpreter."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain_local.sampling.draw import DrawnTokens, draw_faults, draw_for, draw_tokens
from tests.kit.triton_interpreter import DEVICE, in_the_interpreter, kernels_run, run_interpreted

CPU = torch.device("cpu")


@in_the_interpreter
@pytest.mark.long  # the interpreter takes its time; `nox -s proofs` installs triton
def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(Path(__file__))


def drawn(logits: torch.Tensor, temperature: float, u: torch.Tensor) -> DrawnTokens:
    from retrain_local.sampling import draw_triton

    return draw_triton.draw_tokens(logits.to(DEVICE), temperature, u.to(DEVICE), entropy=True)


@kernels_run
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("vocabulary", [5, 4096, 10_007])
@pytest.mark.parametrize("temperature", [0.3, 1.0])
def test_the_same_tokens_for_the_same_uniforms(vocabulary: int, temperature: float, dtype: torch.dtype) -> None:
    numbers = torch.Generator().manual_seed(vocabulary)
    logits = (3 * torch.randn(30, vocabulary, generator=numbers)).to(dtype)
    u = torch.rand(30, generator=numbers, dtype=torch.float64)
    got, wanted = drawn(logits, temperature, u), draw_tokens(logits, temperature, u, entropy=True)
    cumulative = torch.softmax(logits.double() / temperature, -1).cumsum(-1)
    for row, token in enumerate(got.tokens_B.tolist()):
        below = float(cumulative[row, token - 1]) if token else 0.0
        assert below - 1e-5 <= float(u[row]) <= float(cumulative[row, token]) + 1e-5
    same = got.tokens_B.cpu() == wanted.tokens_B
    assert same.float().mean() > 0.95  # but for uniforms at the edge of a share
    torch.testing.assert_close(got.logprobs_B.cpu()[same], wanted.logprobs_B[same], atol=1e-4, rtol=0)
    torch.testing.assert_close(got.entropies_B.cpu(), wanted.entropies_B, atol=1e-4, rtol=0)


@kernels_run
@pytest.mark.parametrize("u", [0.0, 0.5, np.nextafter(1.0, 0.0)])
@pytest.mark.parametrize("possible", [0, 3, 4095, 4096, 8999])
def test_a_token_of_probability_zero_is_never_drawn(u: float, possible: int) -> None:
    logits = torch.full((1, 9000), -torch.inf)
    logits[0, possible] = 3.0
    found = drawn(logits, 1.0, torch.tensor([u], dtype=torch.float64))
    assert found.tokens_B.item() == possible
    assert found.logprobs_B.item() == 0.0
    assert found.entropies_B.item() == 0.0


@kernels_run
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("place", [4, 4500])
def test_a_bad_logit_shows_in_the_logprob_and_the_token_is_one(bad: float, place: int) -> None:
    logits = torch.zeros(2, 5000)
    logits[1, place] = bad
    found = drawn(logits, 1.0, torch.tensor([0.1, 0.1], dtype=torch.float64))
    assert torch.isfinite(found.logprobs_B).tolist() == [True, False]
    assert (found.tokens_B >= 0).all()
    assert (found.tokens_B < 5000).all()


@kernels_run
def test_the_proof_finds_them_right() -> None:
    from retrain_local.sampling import draw_triton

    assert list(draw_faults(draw_triton.draw_tokens, DEVICE, torch.float32, 151_936)) == []


def test_a_cpu_draws_with_pytorch_and_has_no_faults() -> None:
    assert draw_for(CPU, torch.float32, 1000) is draw_tokens
    for dtype in (torch.float32, torch.bfloat16):
        assert list(draw_faults(draw_tokens, CPU, dtype, 1000)) == []


def test_a_wrong_draw_is_found() -> None:
    def wrong(name: str, change: Any) -> list[str]:
        def draw(*given: Any, **options: Any) -> DrawnTokens:
            found = draw_tokens(*given, **options)
            return replace(found, **{name: change(getattr(found, name))})

        return list(draw_faults(draw, CPU, torch.float32, 1000))

    assert "it drew" in wrong("tokens_B", lambda x: x + 1)[0]
    assert "log-probability" in wrong("logprobs_B", lambda x: x + 0.01)[0]
    assert "entropy" in wrong("entropies_B", lambda x: x * torch.nan)[0]
