"""All of decoding's Triton kernels at once, in an engine: completions are those of plain PyTorch."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from retrain.api import Sample, SamplingParams
from retrain_local.attention.pages import PagedKernels
from retrain_local.memory import sizes
from retrain_local.model.pair import Placement
from retrain_local.sampling.engine import PytorchEngine
from tests.kit.local_backend import Local
from tests.kit.local_engines import make_engine, paged
from tests.kit.triton_interpreter import INTERPRETER, elsewhere, needs_triton, run_interpreted

CPU = torch.device("cpu")


@needs_triton
@elsewhere
@pytest.mark.long  # the interpreter takes its time; `nox -s proofs` installs triton
def test_the_kernels_in_the_interpreter() -> None:
    run_interpreted(Path(__file__))


@pytest.mark.skipif(os.environ.get(INTERPRETER) != "1", reason="test_gpu.py has engines on CUDA")
def test_an_engine_on_kernels_alone(local: Local, monkeypatch: pytest.MonkeyPatch) -> None:
    from retrain_local.attention.paged_triton import TritonPages
    from retrain_local.model.decode_triton import KERNELS
    from retrain_local.sampling import draw_triton

    monkeypatch.setattr(sizes, "MERGE_LIMIT", 0)
    monkeypatch.setattr(Placement, "is_stacked", property(lambda _: True))
    pair = local.pair(seed=1)
    with torch.no_grad():
        for name, p in pair.parameters.items():
            if "lora_B" in name:
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    pair.publish()

    def sampled(kernels: Any) -> tuple[PytorchEngine, Callable[[], list[Sample]]]:
        engine = make_engine(pair.sampler, kernels=paged(kernels))
        params = SamplingParams(max_tokens=6, temperature=0.8, entropy=True)
        return engine, lambda: [sample for group in engine.sample(local.requests[:2], params) for sample in group]

    _, plain = sampled(PagedKernels())
    wanted = plain()
    sampler: Any = pair.sampler
    sampler._decode = KERNELS
    engine, on_kernels = sampled(TritonPages(20))
    engine._draw = draw_triton.draw_tokens
    for one, other in zip(on_kernels(), wanted, strict=True):
        assert one.tokens_T.tolist() == other.tokens_T.tolist()
        np.testing.assert_allclose(one.logprobs_T, other.logprobs_T, atol=1e-4)
        assert one.entropies_T is not None
        assert other.entropies_T is not None
        np.testing.assert_allclose(one.entropies_T, other.entropies_T, atol=1e-4)
