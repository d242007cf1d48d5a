"""Architectures that transformers computes: exactly, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.api import SampleRequest
from retrain_local.memory import sizes
from retrain_local.model.hf_model import HfDecoder
from tests.kit.hf_models import SERVED, hf_model
from tests.kit.local_backend import Local
from tests.kit.local_pairs import check_peft_agrees, logits_of, own_logits, relative, shake
from tests.kit.shared import first_or_long


@pytest.fixture(params=sorted(SERVED))
def named(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Path]:
    model = hf_model(request.param, SERVED[request.param])
    model.save_pretrained(tmp_path)
    return model, tmp_path


@pytest.mark.parametrize("merge_limit", first_or_long([sizes.MERGE_LIMIT, 0]))
def test_both_decoders_compute_what_peft_computes(
    named: tuple[Any, Path], merge_limit: int, local: Local, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "MERGE_LIMIT", merge_limit)
    model, folder = named
    pair = local.pair(folder)
    assert isinstance(pair.trained, HfDecoder)
    with torch.no_grad():
        assert relative(logits_of(pair.sampler), own_logits(model)) < 1e-5
        base = logits_of(pair.trained)
    shake(pair)
    with torch.no_grad(), pair.trained.as_reference():
        assert torch.equal(logits_of(pair.trained), base)
    with torch.no_grad():
        started = logits_of(pair.trained)
        pair.trained.keep_reference()
        for p in pair.parameters.values():
            p.mul_(1.5)
        with pair.trained.as_reference():
            assert torch.equal(logits_of(pair.trained), started)
        assert not torch.equal(logits_of(pair.trained), started)
    check_peft_agrees(pair, model, tmp_path / "adapter")


def test_a_sampler_in_another_dtype(named: tuple[Any, Path], local: Local) -> None:
    pair = local.pair(named[1], sampler_dtype=torch.bfloat16, sampler_devices=[torch.device("cpu")] * 2)
    assert (pair.trained.dtype, pair.sampler.dtype) == (torch.float32, torch.bfloat16)
    with torch.no_grad():
        exact, rounded = logits_of(pair.trained), logits_of(pair.sampler)
        assert torch.equal(logits_of(pair.samplers[1]), rounded)
    assert relative(rounded, exact) < 0.1


def test_the_shape_is_measured(local: Local, tmp_path: Path) -> None:
    hf_model("DeepseekV3", SERVED["DeepseekV3"]).save_pretrained(tmp_path)
    shape = local.pair(tmp_path).trained.shape
    assert (shape.layers, shape.heads, shape.kv_heads) == (3, 4, 4)
    assert (shape.head_size, shape.value_size, shape.hidden, shape.inner) == (16, 12, 48, 80)
    assert (shape.vocabulary, shape.context) == (200, 64)


@pytest.mark.parametrize("kind", first_or_long(["Gemma2", "GPT2", "GptOss"]))
def test_a_whole_step(kind: str, local: Local, tmp_path: Path) -> None:
    hf_model(kind, SERVED[kind]).save_pretrained(tmp_path)
    backend = local.make(tmp_path)
    requests = [SampleRequest(prompt_T=torch.arange(5, 5 + n).numpy(), seeds_G=(1, 2, 3)) for n in (3, 9)]
    for step in range(2):
        report = backend.train(local.roll(backend, requests=requests, step=step))
        backend.publish()
        assert report.ratio_max == pytest.approx(1.0, abs=1e-4)
        assert report.grad_norm
